#include "shm/group.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace engine_cpu::shm {
namespace {

constexpr std::size_t CHUNK = std::size_t{256} << 10;  // a slot: what stays in a core's second-level cache
constexpr std::size_t LETTER = std::size_t{64} << 10;  // of send and recv
constexpr std::size_t TWO_PHASES = std::size_t{32} << 10;  // from here on more than two ranks share out the adding

int cores() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

struct Group::Rank {
    Counter round;
    alignas(64) std::uint64_t tags[2];  // what the rank is calling, by the round's parity
};

struct Group::Channel {
    Counter sent, taken;
    std::uint64_t lengths[2];
    std::uint32_t next_sent, next_taken;  // each is read and written on one side only
    alignas(64) std::uint8_t letters[2][LETTER];
};

std::size_t Group::bytes(int size) {
    const std::size_t n = static_cast<std::size_t>(size);
    return n * sizeof(Rank) + n * n * sizeof(Channel) + n * 2 * n * sizeof(std::uint64_t) + 64 + n * 2 * CHUNK;
}

Group::Group(int memory, int rank, int size, std::vector<int> peers, double timeout, const std::string& level)
    : rank_(rank), size_(size), waiter_{std::move(peers), timeout, cores() >= size}, kernels_(kernels(level)) {
    if (size < 2 || rank < 0 || rank >= size || waiter_.peers.size() != static_cast<std::size_t>(size)) {
        hang_up();
        throw std::invalid_argument("no such rank");
    }
    mapped_ = bytes(size);
    void* mapping = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (mapping == MAP_FAILED) {
        hang_up();
        throw std::runtime_error(std::string("the shared memory cannot be mapped: ") + std::strerror(errno));
    }
    base_ = static_cast<std::uint8_t*>(mapping);
}

Group::Rank& Group::state(int rank) const { return reinterpret_cast<Rank*>(base_)[rank]; }

Group::Channel& Group::channel(int from, int to) const {
    return reinterpret_cast<Channel*>(base_ + size_ * sizeof(Rank))[from * size_ + to];
}

std::uint64_t* Group::sizes(int rank) const {
    auto* all = reinterpret_cast<std::uint64_t*>(base_ + size_ * sizeof(Rank) +
                                                 static_cast<std::size_t>(size_) * size_ * sizeof(Channel));
    return all + (static_cast<std::size_t>(rank) * 2 + (round_ & 1)) * size_;
}

std::uint8_t* Group::slot(int rank) const {
    const std::size_t all = static_cast<std::size_t>(size_) * 2 * CHUNK;
    std::uint8_t* slots = base_ + (mapped_ - all) / 64 * 64;
    return slots + (static_cast<std::size_t>(rank) * 2 + (round_ & 1)) * CHUNK;
}

template <typename Work>
void Group::guarded(Work work) {
    if (base_ == nullptr) throw std::runtime_error("the communicator is closed");
    if (!failure_.empty()) throw std::runtime_error("the communicator failed earlier: " + failure_);
    try {
        work();
    } catch (const std::exception& error) {
        failure_ = error.what();
        hang_up();
        throw;
    }
}

void Group::begin(Op op, std::size_t bytes, std::uint32_t detail) {
    // Mixed so that other sizes, dtypes and roots give other tags.
    tag_ = (static_cast<std::uint64_t>(op) << 56) ^ (static_cast<std::uint64_t>(detail) << 48) ^ bytes;
}

void Group::meet() {
    Rank& mine = state(rank_);
    mine.tags[round_ & 1] = tag_;
    mine.round.set(round_ + 1);
    for (int other = 0; other < size_; ++other) {
        if (other == rank_) continue;
        Rank& theirs = state(other);
        waiter_.wait(theirs.round, round_ + 1, other);
        if (theirs.tags[round_ & 1] != tag_)
            throw std::runtime_error("rank " + std::to_string(other) + " calls another collective, or one of another size");
    }
}

void Group::sum_slots(void* dst, std::size_t offset, std::size_t bytes, DType dtype) const {
    std::vector<const void*> sources(size_);
    for (int r = 0; r < size_; ++r) sources[r] = slot(r) + offset;
    kernels_.sum(dtype, dst, sources.data(), size_, bytes / size_of(dtype));
}

void Group::barrier() {
    guarded([&] {
        begin(Op::barrier, 0, 0);
        meet();
        ++round_;
    });
}

void Group::all_reduce(void* x, std::size_t count, DType dtype) {
    guarded([&] {
        const std::size_t width = size_of(dtype), total = count * width;
        begin(Op::all_reduce, total, static_cast<std::uint32_t>(dtype));
        auto* bytes = static_cast<std::uint8_t*>(x);
        for (std::size_t start = 0; start < total; start += CHUNK) {
            const std::size_t length = std::min(CHUNK, total - start);
            std::memcpy(slot(rank_), bytes + start, length);
            meet();
            if (size_ == 2 || length < TWO_PHASES) {
                sum_slots(bytes + start, 0, length, dtype);  // every rank adds up all, in the same order
                ++round_;
                continue;
            }
            // Each rank adds up its share, in its slot of the next round, and takes the others' shares from theirs.
            const std::size_t share = (length / 64 + size_ - 1) / size_ * 64 + 64;
            const auto from = [&](int rank) { return std::min(length, rank * share); };
            const std::size_t first = from(rank_), end = from(rank_ + 1);
            ++round_;
            std::uint8_t* result = slot(rank_);
            --round_;
            sum_slots(result + first, first, end - first, dtype);
            ++round_;
            meet();
            for (int r = 0; r < size_; ++r)
                std::memcpy(bytes + start + from(r), slot(r) + from(r), from(r + 1) - from(r));
            ++round_;
        }
    });
}

void Group::all_gather(const void* x, void* out, const Parts& parts) {
    guarded([&] {
        std::size_t longest = 0, whole = 0;
        std::vector<std::size_t> place(size_), run(size_);  // bytes before rank r's part in a row, and of the part
        for (int r = 0; r < size_; ++r) {
            place[r] = whole;
            run[r] = parts.lengths[r] * parts.inner;
            whole += run[r];
            longest = std::max(longest, parts.outer * run[r]);
        }
        begin(Op::all_gather, parts.outer * whole, 0);
        const auto* mine = static_cast<const std::uint8_t*>(x);
        auto* result = static_cast<std::uint8_t*>(out);
        for (std::size_t start = 0; start < longest; start += CHUNK) {
            const auto length = [&](int rank) {
                return std::min(CHUNK, std::max(start, parts.outer * run[rank]) - start);
            };
            if (length(rank_)) std::memcpy(slot(rank_), mine + start, length(rank_));
            meet();
            for (int r = 0; r < size_; ++r) {
                const std::uint8_t* from = slot(r);
                for (std::size_t at = start, end = start + length(r); at < end;) {
                    const std::size_t row = at / run[r], column = at % run[r];
                    const std::size_t piece = std::min(run[r] - column, end - at);
                    std::memcpy(result + row * whole + place[r] + column, from + (at - start), piece);
                    at += piece;
                }
            }
            ++round_;
        }
    });
}

void Group::reduce_scatter(const void* x, void* out, const Parts& parts, DType dtype) {
    guarded([&] {
        std::size_t whole = 0, place = 0;
        for (int r = 0; r < size_; ++r) {
            if (r == rank_) place = whole;
            whole += parts.lengths[r] * parts.inner;
        }
        const std::size_t run = parts.lengths[rank_] * parts.inner, total = parts.outer * whole;
        begin(Op::reduce_scatter, total, static_cast<std::uint32_t>(dtype));
        const auto* mine = static_cast<const std::uint8_t*>(x);
        auto* result = static_cast<std::uint8_t*>(out);
        for (std::size_t start = 0; start < total; start += CHUNK) {
            const std::size_t end = std::min(total, start + CHUNK);
            std::memcpy(slot(rank_), mine + start, end - start);
            meet();
            if (run) {
                for (std::size_t row = start / whole; row * whole < end; ++row) {
                    const std::size_t first = std::max(start, row * whole + place);
                    const std::size_t last = std::min(end, row * whole + place + run);
                    if (first < last)
                        sum_slots(result + row * run + (first - row * whole - place), first - start, last - first,
                                  dtype);
                }
            }
            ++round_;
        }
    });
}

void Group::all_to_all(const void* x, void* out, const std::vector<std::size_t>& send,
                       const std::vector<std::size_t>& recv) {
    guarded([&] {
        // The first round says who sends how much to whom; from then on all know how many rounds there are.
        begin(Op::all_to_all, 0, 0);
        std::copy(send.begin(), send.end(), sizes(rank_));
        meet();
        std::size_t longest = 0;
        std::vector<std::size_t> before(size_);  // bytes in rank r's input before what is ours
        for (int r = 0; r < size_; ++r) {
            std::size_t total = 0;
            for (int to = 0; to < size_; ++to) {
                if (to == rank_) before[r] = total;
                total += sizes(r)[to];
            }
            longest = std::max(longest, total);
            if (sizes(r)[rank_] != recv[r])
                throw std::runtime_error("rank " + std::to_string(r) + " sends " + std::to_string(sizes(r)[rank_]) +
                                         " bytes where " + std::to_string(recv[r]) + " are expected");
        }
        ++round_;
        std::size_t total = 0;
        for (std::size_t length : send) total += length;
        const auto* mine = static_cast<const std::uint8_t*>(x);
        auto* result = static_cast<std::uint8_t*>(out);
        for (std::size_t start = 0; start < longest; start += CHUNK) {
            if (start < total) std::memcpy(slot(rank_), mine + start, std::min(CHUNK, total - start));
            meet();
            std::size_t place = 0;
            for (int r = 0; r < size_; ++r) {
                const std::size_t first = std::max(start, before[r]);
                const std::size_t last = std::min(start + CHUNK, before[r] + recv[r]);
                if (first < last)
                    std::memcpy(result + place + (first - before[r]), slot(r) + (first - start), last - first);
                place += recv[r];
            }
            ++round_;
        }
    });
}

void Group::broadcast(void* x, std::size_t total, int root) {
    guarded([&] {
        begin(Op::broadcast, total, static_cast<std::uint32_t>(root));
        auto* bytes = static_cast<std::uint8_t*>(x);
        for (std::size_t start = 0; start < total; start += CHUNK) {
            const std::size_t length = std::min(CHUNK, total - start);
            if (rank_ == root) std::memcpy(slot(root), bytes + start, length);
            meet();
            if (rank_ != root) std::memcpy(bytes + start, slot(root), length);
            ++round_;
        }
    });
}

void Group::send(const void* x, std::size_t total, int to) {
    guarded([&] {
        Channel& way = channel(rank_, to);
        const auto* bytes = static_cast<const std::uint8_t*>(x);
        std::size_t start = 0;
        do {  // an empty tensor is a letter too
            const std::uint32_t number = way.next_sent++;
            waiter_.wait(way.taken, number - 1, to);  // the letter before the last has left its place
            const std::size_t length = std::min(LETTER, total - start);
            std::memcpy(way.letters[number & 1], bytes + start, length);
            way.lengths[number & 1] = total - start;
            way.sent.set(number + 1);
            start += length;
        } while (start < total);
    });
}

void Group::recv(void* x, std::size_t total, int source) {
    guarded([&] {
        Channel& way = channel(source, rank_);
        auto* bytes = static_cast<std::uint8_t*>(x);
        std::size_t start = 0;
        do {
            const std::uint32_t number = way.next_taken++;
            waiter_.wait(way.sent, number + 1, source);
            if (way.lengths[number & 1] != total - start)
                throw std::runtime_error("rank " + std::to_string(source) + " sends another size than is expected");
            const std::size_t length = std::min(LETTER, total - start);
            std::memcpy(bytes + start, way.letters[number & 1], length);
            way.taken.set(number + 1);
            start += length;
        } while (start < total);
    });
}

void Group::hang_up() noexcept {
    for (int& fd : waiter_.peers) {
        if (fd >= 0) ::close(fd);
        fd = -1;
    }
}

void Group::close() noexcept {
    hang_up();
    if (base_ != nullptr) munmap(base_, mapped_);
    base_ = nullptr;
}

}  // namespace engine_cpu::shm
