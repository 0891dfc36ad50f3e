// Attention of a step: rows are cut into tiles, and those with few queries and many keys into segments of keys, which
// threads take one after the other (flash-decoding: Dao, Haziza, Massa, Sizov 2023).
#include "attention.h"

#include <algorithm>

#include "levels/attention_tile.h"
#include "levels/table.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

using Scratch = AttentionScratch;
constexpr double GRAIN = 64 << 10;  // bytes of keys and values that are worth a thread

template <typename How, typename T, bool CODED>
class Step {
public:
    Step(const AttentionForward& a, Scratch& scratch) : a_(a), scratch_(scratch), heads_(a.cache.heads) {}

    void run(int threads) {
        const std::size_t items = plan(threads);
        const auto useful = static_cast<std::size_t>(work_ / GRAIN) + 1;
        threads = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), useful));
        parallel_ahead(threads, items, [&](auto&& each) {
            Scratch::Claim claim(scratch_);
            Tile<How, CODED> tile(a_, claim.memory);
            each([&](std::size_t i, std::size_t next) {  // long prefills come last: they are begun first
                compute(tile, items - 1 - i, next < items ? first_keys(items - 1 - next) : Range{});
            });
        });
        const auto real = static_cast<std::size_t>(a_.query_start_loc[a_.rows]);
        const std::size_t num_heads = heads_ * a_.group, padding = a_.tokens - std::min(real, a_.tokens);
        if (!padding) return;
        std::fill_n(static_cast<T*>(a_.out) + real * num_heads * a_.cache.size, padding * num_heads * a_.cache.size, T{});
        if (a_.lse != nullptr) std::fill_n(a_.lse + real * num_heads, padding * num_heads, 0.0f);
    }

private:
    // The keys that a token sees, of its row of n tokens of which it is the t-th; none where its kv_index is -1.
    void look(std::size_t token, std::int64_t t, std::int64_t n, QueryRow& row) const {
        const bool whole = a_.kv_index == nullptr;
        row.hidden = a_.hidden != nullptr ? a_.hidden[token] : 0;
        row.position = whole ? t : a_.kv_index[token];
        const std::int64_t counted = row.position - __builtin_popcountll(row.hidden);
        row.begin = a_.window ? std::max<std::int64_t>(0, counted - a_.window + 1) : 0;
        row.end = !whole ? row.position + 1 : a_.window ? std::min(n, t + a_.window) : n;
    }

    // Cuts the rows into items, and says how many there are.
    std::size_t plan(int threads) {
        auto& rows = scratch_.rows();
        rows.resize(a_.rows);
        double total = 0;
        const double bytes = static_cast<double>(a_.cache.size * 2 * size_of(a_.cache.dtype));
        for (std::size_t r = 0; r < a_.rows; ++r) {
            Scratch::Row& row = rows[r];
            const std::int32_t first = a_.query_start_loc[r];
            const std::int64_t n = a_.query_start_loc[r + 1] - first;
            const std::size_t queries = static_cast<std::size_t>(n) * a_.group;
            row.tiles = (queries + Scratch::ROWS - 1) / Scratch::ROWS;
            row.segments = row.tiles ? 1 : 0;
            row.begin = row.end = 0;
            QueryRow seen{};
            for (std::int64_t t = 0; t < n; ++t) {
                look(static_cast<std::size_t>(first + t), t, n, seen);
                if (seen.begin >= seen.end) continue;
                row.begin = row.end ? std::min(row.begin, seen.begin) : seen.begin;
                row.end = std::max(row.end, seen.end);
            }
            constexpr auto step = static_cast<std::int64_t>(STEP);
            row.begin = row.begin / step * step;
            const std::int64_t keys = row.end - row.begin;
            row.segment_keys = keys;
            if (row.tiles && queries <= scratch_.split_rows()) {
                const auto least = static_cast<std::int64_t>(Scratch::SEGMENT_KEYS);
                constexpr auto most = static_cast<std::int64_t>(Scratch::SEGMENTS);
                row.segment_keys = std::max(least, ((keys + most - 1) / most + step - 1) / step * step);
                row.segments = static_cast<std::size_t>((keys + row.segment_keys - 1) / row.segment_keys);
            }
            total += static_cast<double>(keys) * bytes * static_cast<double>(std::max<std::size_t>(1, queries / 16));
        }
        // A row is divided where one of its heads alone is more than a fair piece. There are fewer such heads than
        // pieces, and so places enough to put their parts.
        const double piece = total * static_cast<double>(heads_) / static_cast<double>(scratch_.most_pairs());
        std::size_t items = 0, pairs = 0;
        for (Scratch::Row& row : rows) {
            const double head = static_cast<double>(row.end - row.begin) * bytes;
            row.first_pair = -1;
            if (threads > 1 && row.segments > 1 && head > piece && pairs + heads_ <= scratch_.most_pairs()) {
                row.first_pair = static_cast<std::ptrdiff_t>(pairs);
                pairs += heads_;
            }
        }
        join(threads);
        for (Scratch::Row& row : rows) {
            row.first_item = items;
            items += row.follows ? 0 : heads_ * (row.first_pair < 0 ? row.tiles : row.segments);
        }
        work_ = total * static_cast<double>(heads_);
        return items;
    }

    // Rows that begin in the same pages, as those with one prompt's beginning do, are computed together as far as whole
    // segments are the same: these are read once for all. Each row has the segments that it has alone, and so its bits.
    void join(int threads) {
        auto& rows = scratch_.rows();
        auto& order = scratch_.order();
        order.clear();
        for (std::size_t r = 0; r < rows.size(); ++r) {
            rows[r].common = 0;
            rows[r].next = Scratch::NONE;
            rows[r].follows = false;
            if (rows[r].segments > 1 && rows[r].first_pair < 0) order.push_back(r);
        }
        if (order.size() < 2) return;
        std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            const std::int32_t left = first_page(a), right = first_page(b);
            return left != right ? left < right : a < b;
        });
        const std::size_t shares = 2 * static_cast<std::size_t>(std::max(threads, 1));  // every thread finds some
        const std::size_t most = (order.size() * heads_ + shares - 1) / shares;
        for (std::size_t i = 0; i < order.size();) {
            const std::size_t first = order[i];
            std::size_t last = first, count = 1, queries = num_queries(first), common = 0;
            for (++i; i < order.size() && count < most; ++i) {
                const std::size_t r = order[i], found = in_common(first, r);
                const std::size_t all = common ? std::min(common, found) : found;
                // segments that need not be read again: with this row, and without it
                if (all * count <= common * (count - 1) || queries + num_queries(r) > Scratch::ROWS) break;
                common = all;
                queries += num_queries(r);
                ++count;
                rows[last].next = r;
                rows[r].follows = true;
                last = r;
            }
            rows[first].common = common;
        }
    }

    const std::int32_t* table(std::size_t r) const { return a_.block_table + r * a_.table_stride; }

    std::int32_t first_page(std::size_t r) const {
        return table(r)[static_cast<std::size_t>(scratch_.rows()[r].begin) / a_.cache.block];
    }

    std::size_t num_queries(std::size_t r) const {
        return static_cast<std::size_t>(a_.query_start_loc[r + 1] - a_.query_start_loc[r]) * a_.group;
    }

    // How many segments, from the first on, two rows have in common: whole ones, in the same pages.
    std::size_t in_common(std::size_t r, std::size_t other) const {
        const Scratch::Row &left = scratch_.rows()[r], &right = scratch_.rows()[other];
        if (left.begin != right.begin || left.segment_keys != right.segment_keys) return 0;
        const auto block = static_cast<std::int64_t>(a_.cache.block);
        const std::int64_t whole = (std::min(left.end, right.end) - left.begin) / left.segment_keys;
        const std::int64_t end = left.begin + whole * left.segment_keys;
        std::int64_t page = left.begin / block;
        while (page * block < end && table(r)[page] == table(other)[page]) ++page;
        const std::int64_t same = std::min(end, page * block) - left.begin;
        return same < 0 ? 0 : static_cast<std::size_t>(same / left.segment_keys);
    }

    // An item's row, head and part: a tile of its queries, or a segment of its keys.
    struct Item {
        std::size_t row, head, part;
    };

    Item find(std::size_t item) const {
        const auto& rows = scratch_.rows();
        const auto found = std::upper_bound(rows.begin(), rows.end(), item, [](std::size_t value, const Scratch::Row& row) {
            return value < row.first_item;
        });
        const auto r = static_cast<std::size_t>(found - rows.begin()) - 1, within = item - rows[r].first_item;
        return {r, within % heads_, within / heads_};
    }

    // About where an item begins to read.
    Range first_keys(std::size_t item) const {
        const Item at = find(item);
        const Scratch::Row& row = scratch_.rows()[at.row];
        const bool divided = row.first_pair >= 0;
        return {table(at.row), at.head,
                row.begin + (divided ? static_cast<std::int64_t>(at.part) * row.segment_keys : 0), row.end};
    }

    void compute(Tile<How, CODED>& tile, std::size_t item, const Range& then) {
        const auto [r, head, part] = find(item);
        const Scratch::Row& row = scratch_.rows()[r];
        const std::size_t parts = row.first_pair < 0 ? row.tiles : row.segments;
        const auto first = static_cast<std::size_t>(a_.query_start_loc[r]);
        const auto n = static_cast<std::size_t>(a_.query_start_loc[r + 1]) - first;
        if (row.segments > 1) {
            if (row.first_pair < 0) return segments(tile, r, head, then);
            take(tile, first, n, head, 0, n * a_.group);
            segment(tile, row, table(r), first, n * a_.group, head, part, then);
            return;
        }
        const std::size_t queries = n * a_.group, begin = queries * part / parts, end = queries * (part + 1) / parts;
        const auto [from, to] = take(tile, first, n, head, begin, end);
        constexpr auto step = static_cast<std::int64_t>(STEP);
        tile.attend(end - begin, {table(r), head, from / step * step, to}, then);
        give(tile, tile.sums(), first, head, begin, end);
    }

    // Query rows begin .. end - 1 of a row of n tokens into the tile's place `at`; the keys that they see.
    std::pair<std::int64_t, std::int64_t> take(Tile<How, CODED>& tile, std::size_t first, std::size_t n, std::size_t head,
                                               std::size_t begin, std::size_t end, std::size_t at = 0) const {
        std::int64_t from = 0, to = 0;
        for (std::size_t i = begin; i < end; ++i) {
            const std::size_t t = i / a_.group, q_head = head * a_.group + i % a_.group;
            const std::size_t place = at + i - begin;
            QueryRow& row = tile.row(place);
            look(first + t, static_cast<std::int64_t>(t), static_cast<std::int64_t>(n), row);
            row.slope = a_.slopes != nullptr ? a_.slopes[q_head] * LOG2E : 0.0f;
            const auto width = static_cast<std::size_t>(2 * a_.span + 1);
            row.bias = a_.biases != nullptr ? a_.biases + q_head * width + a_.span : nullptr;
            tile.take_query(place, static_cast<const T*>(a_.q) + (first + t) * a_.q_stride + q_head * a_.q_head_stride);
            if (row.begin >= row.end) continue;
            from = to ? std::min(from, row.begin) : row.begin;
            to = std::max(to, row.end);
        }
        return {from, to};
    }

    // All segments of a head, one after the other: of a row, and of those that it is computed with.
    void segments(Tile<How, CODED>& tile, std::size_t leader, std::size_t head, const Range& then) {
        const auto& rows = scratch_.rows();
        const std::size_t stride = tile.stride(), common = rows[leader].common;
        float* const tops = tile.spare() + Scratch::ROWS * stride;
        const auto merged = [&](std::size_t place) {
            return Sums{tile.spare() + place * stride, tops + place, tops + Scratch::ROWS + place};
        };
        const auto queries_into = [&](std::size_t r, std::size_t place) {
            const auto first = static_cast<std::size_t>(a_.query_start_loc[r]);
            take(tile, first, num_queries(r) / a_.group, head, 0, num_queries(r), place);
        };
        const auto keys = [&](std::size_t r, std::size_t s) { return segment_keys(rows[r], table(r), head, s); };
        if (common) {
            std::size_t together = 0;
            for (std::size_t r = leader; r != Scratch::NONE; r = rows[r].next) {
                queries_into(r, together);
                together += num_queries(r);
            }
            for (std::size_t s = 0; s < common; ++s) {
                tile.attend(together, keys(leader, s), keys(leader, s + 1));
                merge(merged(0), tile.sums(), together, stride, s == 0);
            }
        }
        std::size_t place = 0;
        for (std::size_t r = leader; r != Scratch::NONE; r = rows[r].next) {
            const std::size_t queries = num_queries(r);
            const Range after = rows[r].next == Scratch::NONE ? then : keys(rows[r].next, common);
            queries_into(r, 0);
            for (std::size_t s = common; s < rows[r].segments; ++s) {
                tile.attend(queries, keys(r, s), s + 1 < rows[r].segments ? keys(r, s + 1) : after);
                merge(merged(place), tile.sums(), queries, stride, s == 0);
            }
            give(tile, merged(place), static_cast<std::size_t>(a_.query_start_loc[r]), head, 0, queries);
            place += queries;
        }
    }

    // One of them. Whoever computes the last one merges them, in their order: the bits are those of `segments`.
    void segment(Tile<How, CODED>& tile, const Scratch::Row& row, const std::int32_t* table, std::size_t first,
                 std::size_t queries, std::size_t head, std::size_t s, const Range& then) {
        tile.attend(queries, segment_keys(row, table, head, s), then);
        const std::size_t pair = static_cast<std::size_t>(row.first_pair) + head, floats = queries * tile.stride();
        const auto place = [&](std::size_t i) {
            float* memory = scratch_.partial(pair, i);
            return Sums{memory, memory + floats, memory + floats + queries};
        };
        const Sums mine = place(s);
        std::copy_n(tile.sums().values, floats, mine.values);
        std::copy_n(tile.sums().top, queries, mine.top);
        std::copy_n(tile.sums().total, queries, mine.total);
        if (scratch_.done(pair).fetch_add(1, std::memory_order_acq_rel) + 1 != row.segments) return;
        scratch_.done(pair).store(0, std::memory_order_relaxed);
        const Sums merged{tile.spare(), tile.spare() + floats, tile.spare() + floats + queries};
        for (std::size_t i = 0; i < row.segments; ++i) merge(merged, place(i), queries, tile.stride(), i == 0);
        give(tile, merged, first, head, 0, queries);
    }

    static Range segment_keys(const Scratch::Row& row, const std::int32_t* table, std::size_t head, std::size_t s) {
        const std::int64_t begin = row.begin + static_cast<std::int64_t>(s) * row.segment_keys;
        return {table, head, begin, std::min(row.end, begin + row.segment_keys)};
    }

    static void merge(const Sums& into, const Sums& part, std::size_t queries, std::size_t stride, bool first) {
        if (first) {
            std::copy_n(part.values, queries * stride, into.values);
            std::copy_n(part.top, queries, into.top);
            std::copy_n(part.total, queries, into.total);
            return;
        }
        for (std::size_t i = 0; i < queries; ++i) {
            const float top = std::max(into.top[i], part.top[i]), base = top == -INFINITE ? 0.0f : top;
            const float left = exp2(into.top[i] - base), right = exp2(part.top[i] - base);
            float* out = into.values + i * stride;
            const float* added = part.values + i * stride;
            const Vec wide_left = splat(left), wide_right = splat(right);
            for (std::size_t j = 0; j < stride; j += Vec::WIDTH)
                store(out + j, Vec::fma(Vec::load(added + j), wide_right, Vec::load(out + j) * wide_left));
            into.total[i] = into.total[i] * left + part.total[i] * right;
            into.top[i] = top;
        }
    }

    // The results of query rows begin .. end - 1.
    void give(const Tile<How, CODED>& tile, const Sums& sums, std::size_t first, std::size_t head, std::size_t begin,
              std::size_t end) const {
        const std::size_t size = a_.cache.size, num_heads = heads_ * a_.group;
        for (std::size_t i = begin; i < end; ++i) {
            const std::size_t token = first + i / a_.group, q_head = head * a_.group + i % a_.group;
            float top = sums.top[i - begin], total = sums.total[i - begin], factor = 1.0f;
            if (a_.sinks != nullptr) {
                const float sink = a_.sinks[q_head] * LOG2E, with = std::max(top, sink);
                factor = exp2(top - with);
                total = total * factor + exp2(sink - with);
                top = with;
            }
            T* out = static_cast<T*>(a_.out) + (token * num_heads + q_head) * size;
            const float* values = sums.values + (i - begin) * tile.stride();
            const float inverse = total == 0.0f ? 0.0f : factor / total;  // 0: it sees nothing, and its values are 0
            std::size_t j = 0;
            for (; j + Vec::WIDTH <= size; j += Vec::WIDTH) store(out + j, Vec::load(values + j) * splat(inverse));
            for (; j < size; ++j) out[j] = narrow<T>(values[j] * inverse);
            if (a_.lse != nullptr) a_.lse[token * num_heads + q_head] = (top + std::log2(total)) / LOG2E;
        }
    }

    const AttentionForward& a_;
    Scratch& scratch_;
    std::size_t heads_;
    double work_ = 0;
};

}  // namespace

void attention(const AttentionForward& a, AttentionScratch& scratch, int threads) {
    const bool half = a.dtype == DType::bfloat16;
    if (a.cache.dtype == DType::float32)
        Step<Singles, float, false>(a, scratch).run(threads);
    else if (a.cache.coded())
        half ? Step<BF16Pairs, bf16, true>(a, scratch).run(threads)
             : Step<WidenedPairs, float, true>(a, scratch).run(threads);
    else
        half ? Step<BF16Pairs, bf16, false>(a, scratch).run(threads)
             : Step<WidenedPairs, float, false>(a, scratch).run(threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
