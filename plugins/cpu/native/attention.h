// Attention over a paged cache: what the kernels take, and the memory that they compute in.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace engine_cpu {

// One layer's pages. A page holds, head after head, the keys and then the values of `block` tokens:
//
//   keys    in groups of 16 tokens (the last may be shorter), each [size / PAIR, tokens of the group, PAIR]
//   values  [block / PAIR, size, PAIR]
//
// with PAIR 2 in bfloat16, whose dot products take two elements at once, and 1 in float32. One register thus holds the
// same elements of 16 keys, and the scores of 16 keys need no sum across lanes; and prefills multiply with the pages as
// they lie, without packing them first.
//
// In 8 bits (int8, float8) PAIR is 2, and in front of a head's keys stand bfloat16 scales: of the keys of `block` tokens,
// then of their values. A code times its scale is what was stored; the largest of a token's head has the largest code.
// Whatever lies in memory, a code is a finite number.
struct PagedCache {
    DType dtype;
    void* base;
    std::size_t page_stride;  // bytes
    std::size_t heads, size, block;

    bool coded() const { return dtype == DType::int8 || dtype == DType::float8; }
    std::size_t scale_bytes() const { return coded() ? block * 2 * 2 : 0; }  // of a head
    std::size_t head_bytes() const { return scale_bytes() + block * 2 * size * size_of(dtype); }
};

// Stores k and v [tokens, heads, size] at slots [tokens]: page * block + offset. Strides count elements.
struct AttentionWrite {
    DType dtype;
    const void* k;
    std::size_t k_stride, k_head_stride;
    const void* v;
    std::size_t v_stride, v_head_stride;
    const std::int64_t* slots;
    std::size_t tokens;
    PagedCache cache;
};

// out [tokens, heads * group, size], dense, of q [tokens, heads * group, size]; see the interface for the others.
struct AttentionForward {
    DType dtype;
    const void* q;
    std::size_t q_stride, q_head_stride;
    void* out;
    float* lse;                            // [tokens, heads * group], or null
    const std::int32_t* query_start_loc;   // [rows + 1]
    const std::int32_t* block_table;       // [rows, table_stride]
    std::size_t table_stride;
    const std::int64_t* kv_index;          // [tokens]; null: each query sees all tokens of its row
    std::size_t rows, tokens, group;
    PagedCache cache;
    float scale, soft_cap;                 // soft_cap 0: none
    std::int64_t window;                   // 0: none; with whole rows, to both sides
    const float* sinks;                    // [heads * group], or null
    const float* slopes;                   // [heads * group], or null; null where there are trees
    const std::uint64_t* hidden = nullptr;  // [tokens], or null: trees of drafts
    const float* biases = nullptr;          // [heads * group, 2 * span + 1], or null; null where there are trees
    std::int64_t span = 0;
};

// Stores at slots `destination` [count] what is stored at slots `source` [count]; all is read before any is written.
void attention_move(const PagedCache& cache, const std::int64_t* source, const std::int64_t* destination,
                    std::size_t count);

// What a call computes in. It belongs to whoever calls, keeps its address, and serves one call at a time.
class AttentionScratch {
public:
    // Keys of a step; query rows (tokens times heads of a group) of a tile.
    static constexpr std::size_t STEP = 128, ROWS = 96;
    // Up to so many query rows, or one token's, a row's keys may be divided among threads: in at most so many segments,
    // of at least so many keys. Which, its own length alone says: so a row's bits do not depend on the others.
    static constexpr std::size_t SPLIT_ROWS = 32, SEGMENTS = 16, SEGMENT_KEYS = 256;

    struct Row {
        std::size_t first_item, tiles, segments;  // items: heads * tiles, or heads * segments where it is divided
        std::int64_t begin, end;                  // keys that any query sees, from the beginning of a step on
        std::int64_t segment_keys;
        std::ptrdiff_t first_pair;  // of its heads' places among the divided; -1: not divided
        std::size_t common;  // of rows that are computed together the first one's: so many first segments all share
        std::size_t next;    // of these rows the one behind it; NONE: it is the last, or alone
        bool follows;        // it is not the first of them
    };
    static constexpr std::size_t NONE = ~std::size_t{0};

    // divides: false: no row's keys are divided; then a query's bits do not depend on how its row was cut into steps.
    AttentionScratch(int threads, std::size_t size, std::size_t group, bool divides);

    // The memory of one thread, until it is given back.
    class Claim {
    public:
        explicit Claim(AttentionScratch& scratch);
        ~Claim();
        Claim(const Claim&) = delete;
        Claim& operator=(const Claim&) = delete;
        std::byte* memory;

    private:
        std::atomic<bool>* taken_;
    };

    static std::size_t padded(std::size_t size) { return (size + 15) / 16 * 16; }
    std::size_t split_rows() const { return divides_ ? split_rows_ : 0; }
    std::size_t most_pairs() const { return most_pairs_; }
    // A segment's results: [split_rows, padded size] sums, then each row's maximum and sum of weights.
    float* partial(std::size_t pair, std::size_t segment) const {
        return partials_.get() + (pair * SEGMENTS + segment) * partial_floats_;
    }
    std::atomic<std::size_t>& done(std::size_t pair) { return done_[pair]; }
    std::vector<Row>& rows() { return rows_; }
    std::vector<std::size_t>& order() { return order_; }

private:
    struct Unmap {
        std::size_t bytes;
        void operator()(void* memory) const;
    };
    template <typename T>
    using Mapped = std::unique_ptr<T[], Unmap>;
    template <typename T>
    static Mapped<T> map(std::size_t count);

    bool divides_;
    std::size_t threads_, split_rows_, most_pairs_, partial_floats_, thread_bytes_;
    Mapped<std::byte> memory_;  // the system's own: nothing is taken before it is touched
    Mapped<float> partials_;
    std::unique_ptr<std::atomic<bool>[]> taken_;
    std::unique_ptr<std::atomic<std::size_t>[]> done_;
    std::vector<Row> rows_;
    std::vector<std::size_t> order_;  // rows that may be computed together, by their first pages
};

}  // namespace engine_cpu
