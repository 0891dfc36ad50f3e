// Collectives between the ranks of one machine, over one piece of shared memory.
//
// Work goes in rounds. In each, a rank puts up to CHUNK bytes into its slot, raises its counter, waits for the counters
// of all, and reads what it wants from any slot. Slots are double: a rank that starts round k + 2 has seen all others
// start round k + 1, so they have read what it had put up in round k. One wait a round is therefore enough.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"
#include "shm/wait.h"

namespace engine_cpu::shm {

enum class Op : std::uint32_t { barrier = 1, all_reduce, all_gather, reduce_scatter, all_to_all, broadcast };

// A tensor seen as [outer, length, inner bytes] where ranks have parts of `length`.
struct Parts {
    std::size_t outer;
    std::size_t inner;                 // bytes
    std::vector<std::size_t> lengths;  // by rank
};

class Group {
public:
    // Bytes of the shared memory that `size` ranks need; zeroed at first.
    static std::size_t bytes(int size);

    // Maps `memory` (a file descriptor, not kept). `peers` are kept and closed: see Waiter.
    Group(int memory, int rank, int size, std::vector<int> peers, double timeout, const std::string& level);
    ~Group() { close(); }
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    void barrier();
    void all_reduce(void* x, std::size_t count, DType dtype);
    void all_gather(const void* x, void* out, const Parts& parts);
    void reduce_scatter(const void* x, void* out, const Parts& parts, DType dtype);
    // Bytes for, and from, each rank.
    void all_to_all(const void* x, void* out, const std::vector<std::size_t>& send,
                    const std::vector<std::size_t>& recv);
    void broadcast(void* x, std::size_t bytes, int root);
    void send(const void* x, std::size_t bytes, int to);
    void recv(void* x, std::size_t bytes, int source);
    void close() noexcept;

private:
    struct Rank;
    struct Channel;

    template <typename Work>
    void guarded(Work work);  // runs a collective; one that fails leaves the group, so that no other rank waits
    void begin(Op op, std::size_t bytes, std::uint32_t detail);
    void meet();  // raise our counter and wait for all others
    void hang_up() noexcept;
    std::uint8_t* slot(int rank) const;  // of this round
    std::uint64_t* sizes(int rank) const;
    Rank& state(int rank) const;
    Channel& channel(int from, int to) const;
    void sum_slots(void* dst, std::size_t offset, std::size_t bytes, DType dtype) const;

    std::uint8_t* base_ = nullptr;
    std::size_t mapped_ = 0;
    int rank_, size_;
    Waiter waiter_;
    const Kernels& kernels_;
    std::uint32_t round_ = 0;
    std::uint64_t tag_ = 0;
    std::string failure_;
};

}  // namespace engine_cpu::shm
