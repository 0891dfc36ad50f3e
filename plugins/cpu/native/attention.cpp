#include "attention.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <vector>

namespace engine_cpu {

// A thread's memory: queries, scores, weights, sums, merged sums, values without what is unseen (or keys or values of 8
// bits widened to 16, and their scales), and some lists.
AttentionScratch::AttentionScratch(int threads, std::size_t size, std::size_t group, bool divides)
    : divides_(divides),
      threads_(static_cast<std::size_t>(std::max(threads, 1))),
      split_rows_(std::max(SPLIT_ROWS, std::min(group, ROWS))),
      most_pairs_(4 * threads_),
      partial_floats_(split_rows_ * (padded(size) + 2)),
      thread_bytes_((ROWS * padded(size) * 4 * 3 + (ROWS + 1) * (STEP + 32) * 8 + STEP * padded(size) * 4 + ROWS * 64 +
                     STEP * 64 + 4096 + 4095) /
                    4096 * 4096),
      memory_(map<std::byte>(threads_ * thread_bytes_)),
      partials_(map<float>(most_pairs_ * SEGMENTS * partial_floats_)),
      taken_(new std::atomic<bool>[threads_]()),
      done_(new std::atomic<std::size_t>[most_pairs_]()) {}

template <typename T>
AttentionScratch::Mapped<T> AttentionScratch::map(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return Mapped<T>(static_cast<T*>(memory), Unmap{bytes});
}

void AttentionScratch::Unmap::operator()(void* memory) const { munmap(memory, bytes); }

AttentionScratch::Claim::Claim(AttentionScratch& scratch) {
    for (std::size_t i = 0;; i = i + 1 == scratch.threads_ ? 0 : i + 1)
        if (!scratch.taken_[i].exchange(true, std::memory_order_acquire)) {
            memory = scratch.memory_.get() + i * scratch.thread_bytes_;
            taken_ = &scratch.taken_[i];
            return;
        }
}

AttentionScratch::Claim::~Claim() { taken_->store(false, std::memory_order_release); }

namespace {

constexpr std::size_t GROUP = 16;  // tokens of a group of keys in a page

// Calls f with each element of a slot's keys, then of its values, in one order; where they have scales, with the bytes
// of these first.
template <typename T, std::size_t PAIR, typename F>
void for_elements(const PagedCache& cache, std::int64_t slot, F&& f) {
    const auto place = static_cast<std::size_t>(slot);
    const std::size_t size = cache.size, block = cache.block, offset = place % block, scales = cache.scale_bytes();
    const std::size_t first = offset / GROUP * GROUP, stride = std::min(GROUP, block - first) * PAIR;
    std::byte* bytes = static_cast<std::byte*>(cache.base) + place / block * cache.page_stride;
    for (std::size_t head = 0; head < cache.heads; ++head, bytes += cache.head_bytes()) {
        if (scales)
            for (const std::size_t at : {offset * 2, (block + offset) * 2})
                for (std::size_t i = 0; i < 2; ++i) f(reinterpret_cast<T*>(bytes)[at + i]);
        T* page = reinterpret_cast<T*>(bytes + scales);
        T* key = page + first * size + (offset - first) * PAIR;
        for (std::size_t i = 0; i < size; i += PAIR, key += stride)
            for (std::size_t j = 0; j < PAIR; ++j) f(key[j]);
        T* value = page + block * size + offset / PAIR * size * PAIR + offset % PAIR;
        for (std::size_t i = 0; i < size; ++i) f(value[i * PAIR]);
    }
}

template <typename T, std::size_t PAIR>
void move(const PagedCache& cache, const std::int64_t* source, const std::int64_t* destination, std::size_t count) {
    std::vector<T> read;
    read.reserve(count * cache.heads * (cache.size * 2 + 4));
    for (std::size_t i = 0; i < count; ++i)
        for_elements<T, PAIR>(cache, source[i], [&](const T& x) { read.push_back(x); });
    const T* next = read.data();
    for (std::size_t i = 0; i < count; ++i)
        for_elements<T, PAIR>(cache, destination[i], [&](T& x) { x = *next++; });
}

}  // namespace

void attention_move(const PagedCache& cache, const std::int64_t* source, const std::int64_t* destination,
                    std::size_t count) {
    if (cache.dtype == DType::float32)
        move<std::uint32_t, 1>(cache, source, destination, count);
    else if (cache.coded())
        move<std::uint8_t, 2>(cache, source, destination, count);
    else
        move<std::uint16_t, 2>(cache, source, destination, count);
}

}  // namespace engine_cpu
