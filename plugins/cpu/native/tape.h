// A tape: native calls recorded once, in order, and run again without Python.
//
// Every binding that computes hands its work, as a small closure, to tape::run(). It runs at once, and where a tape
// records on this thread it is kept as well; Tape::replay() then runs all of them in order. A closure holds addresses,
// sizes and scalars only. Whatever changes from step to step (lengths, block tables, positions) it reads from memory at
// its addresses when it runs; scratch memory keeps its address for as long as the tape does.
//
// A tape of a step of so many rows also replays fewer: calls that work row by row ask tape::rows() how many count.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace engine_cpu {

class Tape {
public:
    // rows: of what is recorded; 0: a replay always computes all of it.
    explicit Tape(std::size_t rows = 0) : rows_(rows) {}
    ~Tape();
    Tape(const Tape&) = delete;
    Tape& operator=(const Tape&) = delete;

    // Begins and ends recording on the calling thread. Throw std::logic_error where another tape records on it, where
    // this tape has recorded already, and where this one does not record on it.
    void begin();
    void end();

    // Runs every call in order, on the calling thread, for the first `rows` rows; 0: for all. What a call throws ends the
    // replay. Throws std::logic_error while the tape still records, std::invalid_argument for more rows than it has.
    void replay(std::size_t rows = 0) const;

    std::size_t size() const { return calls_.size(); }
    std::vector<std::string> names() const;

    template <typename Closure>
    void append(const char* name, const Closure& closure) {
        static_assert(alignof(Closure) <= alignof(std::max_align_t));
        void* kept = new (allocate(sizeof(Closure))) Closure(closure);
        void (*destroy)(void*) = nullptr;
        if constexpr (!std::is_trivially_destructible_v<Closure>)
            destroy = [](void* state) { static_cast<Closure*>(state)->~Closure(); };
        calls_.push_back({[](const void* state) { (*static_cast<const Closure*>(state))(); }, kept, destroy, name});
    }

private:
    struct Call {
        void (*run)(const void* state);
        void* state;
        void (*destroy)(void* state);  // null where there is nothing to do
        const char* name;
    };

    void* allocate(std::size_t bytes);

    std::vector<Call> calls_;
    std::vector<std::unique_ptr<unsigned char[]>> blocks_;  // what the calls' states lie in
    std::size_t used_ = 0, room_ = 0;                       // bytes of the last block
    bool recorded_ = false, records_ = false;
    std::size_t rows_;
};

namespace tape {

// How many of a call's `recorded` rows count now: all, but within a replay of fewer rows the same share of them. A call
// has a multiple of the tape's rows where it has several for each; another number stands for something else.
std::size_t rows(std::size_t recorded) noexcept;

// The tape that records on this thread, or null. Mind the GIL: recording belongs to the thread, not to Python.
Tape* recording() noexcept;

// No tape records on this thread for as long as one of these lives.
class Pause {
public:
    Pause() noexcept;
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

private:
    Tape* paused_;
};

// Runs a call, and keeps it where a tape records on this thread. `name` is for people, and is never copied (a literal).
// Calls within a call are part of it. A call that throws is not kept.
template <typename Closure>
void run(const char* name, const Closure& closure) {
    Tape* tape = recording();
    if (tape == nullptr) return closure();
    {
        Pause pause;
        closure();
    }
    tape->append(name, closure);
}

}  // namespace tape
}  // namespace engine_cpu
