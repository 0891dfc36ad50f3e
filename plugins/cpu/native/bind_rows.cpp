#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bindings.h"
#include "rows.h"
#include "tape.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace engine_cpu {
namespace {

void bound_gather(int threads, std::uintptr_t x, std::size_t stride, std::size_t rows, std::size_t row_bytes,
                  std::uintptr_t index, bool wide, std::size_t count, std::int64_t first, bool part,
                  std::uintptr_t out) {
    const GatherRows a{at(x), stride, rows, row_bytes, at(index), wide, count, first, part, at(out)};
    tape::run("gather_rows", [a, threads] {
        GatherRows now = a;
        now.count = tape::rows(now.count);
        gather_rows(now, threads);
    });
}

// table, its stride and width, tokens of a block, block table, its stride, slot mapping
using Group = std::tuple<std::uintptr_t, std::size_t, std::size_t, std::int64_t, std::uintptr_t, std::size_t,
                         std::uintptr_t>;

void bound_prepare(std::uintptr_t tokens, std::size_t tokens_stride, std::size_t rows, std::size_t num_tokens,
                   std::uintptr_t slot_of_row, std::uintptr_t num_computed, std::uintptr_t query_start_loc,
                   std::uintptr_t token_ids, std::uintptr_t positions, const std::vector<Group>& groups) {
    PrepareInputs a{at<const std::int32_t>(tokens),
                    tokens_stride,
                    rows,
                    num_tokens,
                    at<const std::int32_t>(slot_of_row),
                    at<const std::int32_t>(num_computed),
                    at<const std::int32_t>(query_start_loc),
                    at<std::int32_t>(token_ids),
                    at<std::int64_t>(positions),
                    {}};
    for (const auto& [table, stride, width, per_block, block_table, block_stride, mapping] : groups)
        a.groups.push_back({at<const std::int32_t>(table), stride, width, per_block, at<std::int32_t>(block_table),
                            block_stride, at<std::int64_t>(mapping)});
    tape::run("prepare_inputs", [a] { prepare_inputs(a, tape::rows(a.rows), tape::rows(a.num_tokens)); });
}

void bound_place(std::uintptr_t tokens, std::uintptr_t broken, std::size_t count, std::uintptr_t table,
                 std::size_t stride, std::uintptr_t slot, std::uintptr_t place, std::int32_t mark,
                 std::uintptr_t out) {
    const PlaceTokens a{at<const std::int32_t>(tokens), at<const std::uint8_t>(broken),
                        count,                          at<std::int32_t>(table),
                        stride,                         at<const std::int64_t>(slot),
                        at<const std::int64_t>(place),  mark,
                        at<std::int32_t>(out)};
    tape::run("place_tokens", [a] {
        PlaceTokens now = a;
        now.count = tape::rows(now.count);
        place_tokens(now);
    });
}

}  // namespace

void bind_rows(nb::module_& m) {
    m.def("gather_rows", &bound_gather, "threads"_a, "x"_a, "stride"_a, "rows"_a, "row_bytes"_a, "index"_a, "wide"_a,
          "count"_a, "first"_a, "part"_a, "out"_a, unlocked());
    m.def("prepare_inputs", &bound_prepare, "tokens"_a, "tokens_stride"_a, "rows"_a, "num_tokens"_a, "slot_of_row"_a,
          "num_computed"_a, "query_start_loc"_a, "token_ids"_a, "positions"_a, "groups"_a);
    m.def("place_tokens", &bound_place, "tokens"_a, "broken"_a, "count"_a, "table"_a, "stride"_a, "slot"_a, "place"_a,
          "mark"_a, "out"_a);
}

}  // namespace engine_cpu
