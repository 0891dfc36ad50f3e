#include "tape.h"

#include <algorithm>
#include <stdexcept>

namespace engine_cpu {
namespace {

constexpr std::size_t BLOCK = 16384;

thread_local Tape* current = nullptr;

// Of the replay on this thread; none: 0.
struct Share {
    std::size_t of, rows;
};
thread_local Share share{0, 0};

}  // namespace

Tape::~Tape() {
    if (current == this) current = nullptr;
    for (auto call = calls_.rbegin(); call != calls_.rend(); ++call)
        if (call->destroy != nullptr) call->destroy(call->state);
}

void Tape::begin() {
    if (current != nullptr) throw std::logic_error("a tape records on this thread already");
    if (recorded_) throw std::logic_error("this tape has recorded already: make another");
    recorded_ = records_ = true;
    current = this;
}

void Tape::end() {
    if (current != this) throw std::logic_error("this tape does not record on this thread");
    records_ = false;
    current = nullptr;
}

void Tape::replay(std::size_t rows) const {
    if (records_) throw std::logic_error("this tape still records");
    if (rows > rows_) throw std::invalid_argument("this tape has fewer rows");
    struct Within {
        explicit Within(Share now) : before(share) { share = now; }
        ~Within() { share = before; }
        Share before;
    } within(rows && rows < rows_ ? Share{rows_, rows} : Share{0, 0});
    for (const Call& call : calls_) call.run(call.state);
}

std::vector<std::string> Tape::names() const {
    std::vector<std::string> names;
    for (const Call& call : calls_) names.emplace_back(call.name);
    return names;
}

void* Tape::allocate(std::size_t bytes) {
    constexpr std::size_t ALIGNMENT = alignof(std::max_align_t);  // of what operator new[] returns, too
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (used_ + bytes > room_) {
        room_ = std::max(BLOCK, bytes);
        used_ = 0;
        blocks_.push_back(std::make_unique<unsigned char[]>(room_));
    }
    void* place = blocks_.back().get() + used_;
    used_ += bytes;
    return place;
}

namespace tape {

std::size_t rows(std::size_t recorded) noexcept {
    return share.of && recorded % share.of == 0 ? recorded / share.of * share.rows : recorded;
}

Tape* recording() noexcept { return current; }

Pause::Pause() noexcept : paused_(current) { current = nullptr; }
Pause::~Pause() { current = paused_; }

}  // namespace tape
}  // namespace engine_cpu
