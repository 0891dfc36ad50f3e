// The other threads of the process: torch's OpenMP team.
#pragma once

namespace engine_cpu {

// Has GNU's OpenMP library, where torch computes with it, put its threads to sleep soon after each region: else they spin
// for 300,000 looks at a word (10 ms and more), on the cores that this module's threads need for the kernel after it, and
// a server's other processes for theirs. The library does so by itself where it manages more threads than there are cores
// (its manual, under GOMP_SPINCOUNT; environment variables are read before this module is loaded): the first call gives
// it that many, asleep for good. Later calls, and those with another library or none, do nothing. Thread-safe.
void let_openmp_sleep();

}  // namespace engine_cpu
