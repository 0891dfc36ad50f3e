// Rows of a matrix by their numbers, and a step's inputs from the tables of its slots. Of any dtype: nothing is computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine_cpu {

// out [count, row_bytes], dense, = x[index[i] - first]
struct GatherRows {
    const void* x;
    std::size_t stride;  // bytes from row to row
    std::size_t rows;    // of x
    std::size_t row_bytes;
    const void* index;  // int32 or int64 [count]
    bool wide;          // int64
    std::size_t count;
    std::int64_t first;
    bool part;  // an index outside gives zeros; else it is an error
    void* out;
};

// Throws std::out_of_range.
void gather_rows(const GatherRows& arguments, int threads);

// out: of each row `parts` pieces of `part_bytes` that lie `stride` bytes apart, one after the other.
struct CopyRows {
    const void* x;
    std::size_t row_stride, stride, rows, parts, part_bytes;
    void* out;
    std::size_t out_stride;  // bytes from row to row
};

void copy_rows(const CopyRows& arguments, int threads);

// See engine.interfaces.ops.Ops.prepare_inputs. Strides count elements.
struct PrepareInputs {
    struct Group {
        const std::int32_t* table;
        std::size_t table_stride, table_width;
        std::int64_t tokens_per_block;
        std::int32_t* block_table;  // [rows, table_width]
        std::size_t block_stride;
        std::int64_t* slot_mapping;  // [tokens]
    };
    const std::int32_t* tokens;  // the slots'
    std::size_t tokens_stride;
    std::size_t rows, num_tokens;
    const std::int32_t* slot_of_row;
    const std::int32_t* num_computed;
    const std::int32_t* query_start_loc;
    std::int32_t* token_ids;
    std::int64_t* positions;
    std::vector<Group> groups;
};

// For the first `rows` rows, which have the first `num_tokens` tokens.
void prepare_inputs(const PrepareInputs& arguments, std::size_t rows, std::size_t num_tokens);

// table[slot[i], place[i]] = tokens[i], and out[i] = broken[i] ? mark : tokens[i]
struct PlaceTokens {
    const std::int32_t* tokens;
    const std::uint8_t* broken;
    std::size_t count;
    std::int32_t* table;
    std::size_t stride;  // elements from slot to slot
    const std::int64_t* slot;
    const std::int64_t* place;
    std::int32_t mark;
    std::int32_t* out;
};

void place_tokens(const PlaceTokens& arguments);

}  // namespace engine_cpu
