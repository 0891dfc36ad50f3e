// AMX's instructions on processors that have none: each ends in the signal for unknown instructions, whose handler reads the
// instruction and does it by native/levels/amx/emulated.h. So the code that is shipped runs as it is, encodings included.
#pragma once

namespace self_test {

void trap_amx();

// How many were done so far.
unsigned long trapped();

}  // namespace self_test
