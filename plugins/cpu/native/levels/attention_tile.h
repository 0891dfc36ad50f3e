// A tile of attention: some query rows of one KV head over a range of keys, by online softmax (Milakov, Gimelshein 2018;
// FlashAttention, Dao et al. 2022), a step of 128 keys after the other.
//
// The bits of a query row depend on the keys that it sees and on where the range begins, and on nothing else: steps end
// at multiples of 128 keys, every score and every sum is added up in one order, and a step of which a row sees nothing
// leaves it as it is.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "levels/attention_codes.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {

constexpr float LOG2E = 1.44269504088896341f;
constexpr std::size_t GROUP = 16;  // tokens of a group of keys in a page
constexpr std::size_t STEP = AttentionScratch::STEP;
constexpr std::size_t SCORES = STEP + 32;  // floats from one row of scores to the next: the ends are written in full

// Calls f with the number as a constant.
template <std::size_t MOST, typename F>
inline void with_constant(std::size_t n, F&& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return with_constant<MOST - 1>(n, f);
    }
    f(std::integral_constant<std::size_t, MOST>{});
}

// What a tile's rows see and how: query rows are tokens times heads of a group.
struct QueryRow {
    std::int64_t begin, end;  // of the keys that it sees
    std::int64_t position;    // its own
    std::uint64_t hidden;     // bit b: it does not see key end - 1 - b
    float slope;              // of its head, times LOG2E
    const float* bias;        // of its head: bias[d] for a key d places ahead, -span .. span; or null
};

// Keys key .. end - 1 of a head of the row with this table. None: end <= key.
struct Range {
    const std::int32_t* table = nullptr;
    std::size_t head = 0;
    std::int64_t key = 0, end = 0;
};

// Rows' running results: sums [rows, stride], and for each row the largest score (times LOG2E) and the sum of weights.
struct Sums {
    float* values;
    float* top;
    float* total;
};

// CODED: the cache has 8 bits. Few rows decode it in registers. For more a step's keys, and then its values, are widened
// into memory of the tile's own and multiplied from there, to the same bits. The scales of keys go to scores, those of
// values to weights.
template <typename How, bool CODED>
class Tile {
    static_assert(!CODED || How::PAIR == 2);
    using Cache = typename How::Cache;
    using Operand = typename How::Operand;
    static constexpr std::size_t WIDTH = Vec::WIDTH, PAIR = How::PAIR;
    // Accumulators of a product, rows times registers: what fits beside the operands.
#if defined(__AVX512F__)
    static constexpr std::size_t MR = std::is_same_v<typename How::Wide, Two> ? 5 : 6, NR = 4;
#elif defined(__AVX2__)
    static constexpr std::size_t MR = std::is_same_v<typename How::Wide, Two> ? 5 : 6, NR = 2;
#elif defined(ENGINE_CPU_NEON)
    static constexpr std::size_t MR = std::is_same_v<typename How::Wide, Two> ? 4 : 5, NR = 4;
#else
    static constexpr std::size_t MR = 2, NR = 2;
#endif

    static constexpr std::size_t WAITING = 16;  // up to so many rows memory is what takes time
    // Where to fetch to: the first level can wait for half as many lines at once.
    static constexpr int LEVEL_2 = 2;

    struct Keys {  // a register's
        const void* data;
        std::size_t stride;  // from one pair of elements to the next
        std::size_t at, count;
    };
    struct Values {  // of so many pairs of keys
        const void* data;
        std::size_t at, pairs;
    };

public:
    Tile(const AttentionForward& a, std::byte* memory)
        : a_(a),
          size_(a.cache.size),
          head_bytes_(a.cache.head_bytes()),
          stride_(AttentionScratch::padded(size_)),
          scale_(a.scale * LOG2E),
          plain_(a.soft_cap == 0.0f && a.slopes == nullptr && a.biases == nullptr && a.scale > 0.0f) {
        constexpr std::size_t ROWS = AttentionScratch::ROWS;
        const auto take = [&memory](std::size_t bytes) {
            std::byte* taken = memory;
            memory += (bytes + 63) / 64 * 64;
            return taken;
        };
        queries_ = reinterpret_cast<Operand*>(take(ROWS * stride_ * sizeof(Operand)));
        scores_ = reinterpret_cast<float*>(take(ROWS * SCORES * 4));
        weights_ = reinterpret_cast<Operand*>(take(ROWS * SCORES * sizeof(Operand)));
        sums_ = {reinterpret_cast<float*>(take(ROWS * stride_ * 4)), reinterpret_cast<float*>(take(ROWS * 4)),
                 reinterpret_cast<float*>(take(ROWS * 4))};
        factors_ = reinterpret_cast<float*>(take(ROWS * 4));
        // With codes up to two groups of 16 keys more: where blocks have others, a step begins and ends within one.
        clean_ = reinterpret_cast<Cache*>(take((STEP + (CODED ? 2 * GROUP : 0)) * stride_ * sizeof(Cache)));
        key_scales_ = reinterpret_cast<float*>(take(CODED ? SCORES * 4 : 0));
        value_scales_ = reinterpret_cast<float*>(take(CODED ? SCORES * 4 : 0));
        if constexpr (CODED) widen_ = a.cache.dtype == DType::int8 ? &widen_codes<Int8> : &widen_codes<E4M3>;
        rows_ = reinterpret_cast<QueryRow*>(take(ROWS * sizeof(QueryRow)));
        keys_ = reinterpret_cast<Keys*>(take(STEP * sizeof(Keys)));
        values_ = reinterpret_cast<Values*>(take(STEP * sizeof(Values)));
        merged_ = {reinterpret_cast<float*>(memory), nullptr, nullptr};
    }

    const Sums& sums() const { return sums_; }
    float* spare() const { return merged_.values; }
    std::size_t stride() const { return stride_; }
    QueryRow& row(std::size_t i) const { return rows_[i]; }

    template <typename T>
    void take_query(std::size_t i, const T* q) const {
        if constexpr (std::is_same_v<T, Operand>)
            std::copy_n(q, size_, queries_ + i * size_);
        else
            for (std::size_t k = 0; k < size_; ++k) queries_[i * size_ + k] = widen(q[k]);
    }

    // Leaves in `sums` what the first `count` rows make of a range of keys; `then` is read after it.
    void attend(std::size_t count, const Range& range, const Range& then) {
        count_ = count;
        std::fill_n(sums_.values, count * stride_, 0.0f);
        std::fill_n(sums_.top, count, -INFINITE);
        std::fill_n(sums_.total, count, 0.0f);
        for (std::int64_t key = range.key; key < range.end;) {
            const auto step = static_cast<std::int64_t>(STEP);
            const std::int64_t next = std::min(range.end, (key / step + 1) * step);
            const auto n = static_cast<std::size_t>(next - key);
            const Range following = next < range.end ? Range{range.table, range.head, next, range.end} : then;
            list_keys(range.table, range.head, key, n);
            if constexpr (CODED) {
                if (widens()) {
                    multiply_keys<AsStored<How>>();
                    weigh(key, n);
                    widen_values(range.table, range.head, key, n, following);
                    multiply_values<AsStored<How>>();
                } else if (a_.cache.dtype == DType::int8) {
                    multiply<Decoded<How, Int8>>(range, key, n, following);
                } else {
                    multiply<Decoded<How, E4M3>>(range, key, n, following);
                }
            } else {
                multiply<AsStored<How>>(range, key, n, following);
            }
            key = next;
        }
    }

private:
    using Stored = std::conditional_t<CODED, std::uint8_t, Cache>;

    bool widens() const { return CODED && count_ > WAITING; }

    // A step of keys where they lie.
    template <typename From>
    void multiply(const Range& range, std::int64_t key, std::size_t n, const Range& following) {
        multiply_keys<From>();
        const bool all = weigh(key, n);
        list_values(range.table, range.head, key, n, all);
        if (count_ <= WAITING) list_next(following);
        multiply_values<From>();
    }

    // A head's keys, or the scales before them.
    const Stored* page(const std::int32_t* table, std::size_t head, std::int64_t block) const {
        const auto* bytes = static_cast<const std::byte*>(a_.cache.base) +
                            static_cast<std::size_t>(table[block]) * a_.cache.page_stride;
        return reinterpret_cast<const Stored*>(bytes + head * head_bytes_);
    }

    // Calls f(page, offset, count, first) for the parts of keys key .. key + n - 1 that lie in one page each.
    template <typename F>
    void for_pages(const std::int32_t* table, std::size_t head, std::int64_t key, std::size_t n, F&& f) const {
        for (std::size_t at = 0; at < n;) {
            const std::size_t place = static_cast<std::size_t>(key) + at;
            const std::size_t block = place / a_.cache.block, offset = place % a_.cache.block;
            const std::size_t part = std::min(a_.cache.block - offset, n - at);
            f(page(table, head, static_cast<std::int64_t>(block)), offset, part, at);
            at += part;
        }
    }

    void list_keys(const std::int32_t* table, std::size_t head, std::int64_t key, std::size_t n) {
        num_keys_ = 0;
        [[maybe_unused]] Cache* room = clean_;
        for_pages(table, head, key, n, [&](const Stored* data, std::size_t offset, std::size_t part, std::size_t at) {
            if constexpr (CODED) {
                take_scales(data, offset, part, at);
                data += a_.cache.scale_bytes();
                if (widens()) return list_keys_of(widen_keys(data, offset, part, room), offset, part, at);
            }
            list_keys_of(data, offset, part, at);
        });
        if constexpr (CODED)  // a register's lanes behind the last key have a weight of 0
            for (float* scales : {key_scales_, value_scales_}) std::fill_n(scales + n, GROUP, 0.0f);
    }

    // A page's keys `offset` .. offset + part - 1, the first of which is the step's key `at`; of data [block * size].
    template <typename E>
    void list_keys_of(const E* data, std::size_t offset, std::size_t part, std::size_t at) {
        for (std::size_t i = 0; i < part;) {
            const std::size_t group = (offset + i) / GROUP, lane = (offset + i) % GROUP;
            const std::size_t tokens = std::min(GROUP, a_.cache.block - group * GROUP);
            const std::size_t count = std::min({WIDTH, tokens - lane});
            keys_[num_keys_++] = {data + group * GROUP * size_ + lane * PAIR, tokens * PAIR, at + i, count};
            i += count;
        }
    }

    void take_scales(const Stored* page, std::size_t offset, std::size_t part, std::size_t at) const {
        const bf16* scales = reinterpret_cast<const bf16*>(page) + offset;
        for (std::size_t i = 0; i < part; ++i) key_scales_[at + i] = widen(scales[i]);
        scales += a_.cache.block;
        for (std::size_t i = 0; i < part; ++i)  // what nobody wrote has any
            value_scales_[at + i] = (scales[i].bits & 0x7f80u) == 0x7f80u ? 0.0f : widen(scales[i]);
    }

    // Widens the whole groups in which these keys of a page lie, to `room`, which is moved behind them; asks for the
    // values. Returns where the page's first key would be.
    const Cache* widen_keys(const Stored* data, std::size_t offset, std::size_t part, Cache*& room) const {
        const std::size_t block = a_.cache.block, first = offset / GROUP * GROUP;
        const std::size_t last = std::min(block, (offset + part + GROUP - 1) / GROUP * GROUP);
        widen_(data + first * size_, room, (last - first) * size_, static_cast<std::ptrdiff_t>(block * size_));
        const Cache* found = room - first * size_;
        room += (last - first) * size_;
        return found;
    }

    // A step's values as one run of pairs. Those of an odd number's last key, and those that a row does not see, have a
    // weight of 0, and are finite. Asks for what is read after them.
    void widen_values(const std::int32_t* table, std::size_t head, std::int64_t key, std::size_t n, const Range& next) {
        Cache* room = clean_;
        for_pages(table, head, key, n, [&](const Stored* data, std::size_t offset, std::size_t part, std::size_t at) {
            const Stored* codes = data + a_.cache.scale_bytes() + (a_.cache.block + offset) * size_;
            const std::size_t count = (part + part % 2) * size_;
            std::ptrdiff_t ahead = 0;
            if (const std::int64_t place = next.key + static_cast<std::int64_t>(at); place < next.end) {
                const auto to = static_cast<std::size_t>(place), block = a_.cache.block;
                const Stored* follows = page(next.table, next.head, static_cast<std::int64_t>(to / block));
                __builtin_prefetch(follows, 0, LEVEL_2);
                follows += a_.cache.scale_bytes() + to % block * size_;
                ahead = reinterpret_cast<const char*>(follows) - reinterpret_cast<const char*>(codes);
            }
            widen_(codes, room, count, ahead);
            room += count;
        });
        values_[0] = {clean_, 0, (n + 1) / 2};
        num_values_ = 1;
    }

    // The first keys of what is read after this step.
    void list_next(const Range& range) {
        constexpr auto group = static_cast<std::int64_t>(GROUP);
        for (std::size_t i = 0; i < NR; ++i) {
            const std::int64_t key = range.key / group * group + static_cast<std::int64_t>(i) * group;
            const auto place = static_cast<std::size_t>(key);
            if (key < range.end)
                next_[i] = page(range.table, range.head, static_cast<std::int64_t>(place / a_.cache.block)) +
                           a_.cache.scale_bytes() + place % a_.cache.block * size_;
            else
                next_[i] = i ? next_[i - 1] : keys_[0].data;
        }
        if constexpr (CODED) {
            const auto block = static_cast<std::int64_t>(a_.cache.block), last = range.key + static_cast<std::int64_t>(STEP);
            for (std::int64_t key = range.key / block * block; key < std::min(range.end, last); key += block)
                __builtin_prefetch(page(range.table, range.head, key / block), 0, LEVEL_2);
        }
    }

    // What is read after run `run` of the values and those that were asked for with the keys.
    const void* after_values(std::size_t run) const {
        const std::size_t place = run + NR;
        return place < num_values_ ? values_[place].data : next_[std::min(place - num_values_, NR - 1)];
    }

    // scores [rows, keys] = queries . keys
    template <typename From>
    void multiply_keys() {
        for (std::size_t first = 0; first < num_keys_;) {
            std::size_t together = 0;
            while (together < NR && first + together < num_keys_ && keys_[first + together].count == WIDTH &&
                   keys_[first + together].stride == keys_[first].stride)
                ++together;
            if (together == NR) {
                for_rows([&](auto rows, auto ahead, std::size_t row) {
                    scores<From, decltype(rows)::value, NR, true, decltype(ahead)::value>(row, first);
                });
                first += NR;
            } else if (together) {
                for_rows([&](auto rows, auto, std::size_t row) {
                    scores<From, decltype(rows)::value, 1, true, false>(row, first);
                });
                ++first;
            } else {
                for_rows([&](auto rows, auto, std::size_t row) {
                    scores<From, decltype(rows)::value, 1, false, false>(row, first);
                });
                ++first;
            }
        }
    }

    // Calls f(number of rows, whether to fetch ahead, first row), the former as constants, so that the numbers differ by
    // one at most. Few rows wait for memory: the first of them ask for what follows.
    template <typename F>
    void for_rows(F&& f) const {
        const std::size_t parts = (count_ + MR - 1) / MR, each = count_ / parts, more = count_ % parts;
        for (std::size_t part = 0, row = 0; part < parts; ++part) {
            const std::size_t n = each + (part < more);
            with_constant<MR>(n, [&](auto rows) {
                if (row == 0 && count_ <= WAITING && !widens())  // what was widened is in the cache
                    f(rows, std::true_type{}, row);
                else
                    f(rows, std::false_type{}, row);
            });
            row += n;
        }
    }

    // What is read after the keys from `first` on: other keys, or else the values of the first ones.
    const void* after(std::size_t first) const {
        return first < num_keys_ ? keys_[first].data
                                 : static_cast<const Stored*>(keys_[(first - num_keys_) % num_keys_].data) +
                                       a_.cache.block * size_;
    }

    template <typename From, std::size_t M, std::size_t N, bool FULL, bool AHEAD>
    void scores(std::size_t row, std::size_t first) const {
        using Element = typename From::Element;
        const Operand* q = queries_ + row * size_;
        const Keys* keys = keys_ + first;
        const Element* data[N];
        std::ptrdiff_t ahead[N] = {};
        for (std::size_t n = 0; n < N; ++n) {
            data[n] = static_cast<const Element*>(keys[n].data);
            if constexpr (AHEAD)
                ahead[n] = static_cast<const char*>(after(first + N + n)) - reinterpret_cast<const char*>(data[n]);
        }
        const std::size_t stride = keys[0].stride;
        Vec sums[M][N];
        for (std::size_t m = 0; m < M; ++m)
            for (std::size_t n = 0; n < N; ++n) sums[m][n] = Vec::zero();
        for (std::size_t i = 0; i < size_; i += PAIR) {
            typename How::Wide wide[N];
            for (std::size_t n = 0; n < N; ++n) {
                wide[n] = FULL ? From::load(data[n]) : From::load(data[n], keys[n].count);
                if constexpr (AHEAD) __builtin_prefetch(reinterpret_cast<const char*>(data[n]) + ahead[n], 0, LEVEL_2);
                data[n] += stride;
            }
            for (std::size_t m = 0; m < M; ++m) {
                const typename How::Spread spread = How::spread(q + m * size_ + i);
                for (std::size_t n = 0; n < N; ++n) sums[m][n] = How::dot(sums[m][n], spread, wide[n]);
            }
        }
        for (std::size_t m = 0; m < M; ++m)
            for (std::size_t n = 0; n < N; ++n) store(scores_ + (row + m) * SCORES + keys[n].at, sums[m][n]);
    }

    // From scores to weights [rows, keys], and what the sums so far are to be multiplied with. True where every row sees
    // every key.
    bool weigh(std::int64_t key, std::size_t n) {
        bool all = true;
        for (std::size_t i = 0; i < count_; ++i) {
            const QueryRow& row = rows_[i];
            const std::int64_t length = static_cast<std::int64_t>(n);
            const std::int64_t begin = std::clamp<std::int64_t>(row.begin - key, 0, length);
            const std::int64_t end = std::clamp<std::int64_t>(row.end - key, 0, length);
            all = all && begin == 0 && end == length;
            if (begin >= end) {
                zero(weights_ + i * SCORES, 0, n + PAIR - 1);
                factors_[i] = 1.0f;
            } else {
                weigh_row(i, n, static_cast<std::size_t>(begin), static_cast<std::size_t>(end), key);
            }
        }
        return all;
    }

    static void zero(Operand* weights, std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; i += WIDTH) store(weights + i, Vec::zero());
    }

    void weigh_row(std::size_t i, std::size_t n, std::size_t begin, std::size_t end, std::int64_t key) {
        float* s = scores_ + i * SCORES;
        Operand* p = weights_ + i * SCORES;
        const std::size_t from = begin / WIDTH * WIDTH, to = (end + WIDTH - 1) / WIDTH * WIDTH;
        if constexpr (CODED)
            for (std::size_t j = from; j < to; j += WIDTH) store(s + j, Vec::load(s + j) * Vec::load(key_scales_ + j));
        if (!plain_) bend(s, from, to, rows_[i], key);
        const auto hide = [&](std::size_t j) {
            const auto first = static_cast<std::ptrdiff_t>(begin) - static_cast<std::ptrdiff_t>(j);
            const auto last = static_cast<std::ptrdiff_t>(end) - static_cast<std::ptrdiff_t>(j);
            store(s + j, keep(Vec::load(s + j), first, last, splat(-INFINITE)));
        };
        if (from < begin) hide(from);
        if (end < to) hide(to - WIDTH);
        for (std::uint64_t bits = rows_[i].hidden; bits; bits &= bits - 1) {
            const std::int64_t place = rows_[i].end - 1 - __builtin_ctzll(bits) - key;
            if (place >= static_cast<std::int64_t>(begin) && place < static_cast<std::int64_t>(end)) s[place] = -INFINITE;
        }
        Vec largest_of = splat(-INFINITE);
        for (std::size_t j = from; j < to; j += WIDTH) largest_of = maximum(largest_of, Vec::load(s + j));
        const float factor = plain_ ? scale_ : 1.0f;
        const float top = std::max(sums_.top[i], largest(largest_of) * factor);
        const float base = top == -INFINITE ? 0.0f : top;
        zero(p, 0, from);
        Vec total = Vec::zero();
        const Vec wide_factor = splat(factor), minus = splat(-base);
        for (std::size_t j = from; j < to; j += WIDTH) {
            const Vec weight = exp2(Vec::fma(Vec::load(s + j), wide_factor, minus));
            total = total + weight;
            if constexpr (CODED)
                store(p + j, weight * Vec::load(value_scales_ + j));
            else
                store(p + j, weight);
        }
        zero(p, to, n + PAIR - 1);
        factors_[i] = exp2(sums_.top[i] - base);
        sums_.total[i] = sums_.total[i] * factors_[i] + total.sum();
        sums_.top[i] = top;
    }

    // scale, soft cap, and what positions take away or add, times LOG2E.
    void bend(float* s, std::size_t from, std::size_t to, const QueryRow& row, std::int64_t key) const {
        const bool capped = a_.soft_cap != 0.0f;
        const Vec before = splat(capped ? a_.scale / a_.soft_cap : scale_), after = splat(a_.soft_cap * LOG2E);
        const Vec slope = splat(-row.slope);
        for (std::size_t j = from; j < to; j += WIDTH) {
            Vec x = Vec::load(s + j) * before;
            if (capped) x = tanh(x) * after;
            const std::int64_t ahead = key + static_cast<std::int64_t>(j) - row.position;
            if (row.slope != 0.0f) x = Vec::fma(magnitude(numbered() + splat(static_cast<float>(ahead))), slope, x);
            if (row.bias != nullptr) x = Vec::fma(biases(row.bias, ahead), splat(LOG2E), x);
            store(s + j, x);
        }
    }

    // Those of keys from this place on; far away all are the last one.
    Vec biases(const float* bias, std::int64_t ahead) const {
        const std::int64_t span = a_.span, last = ahead + static_cast<std::int64_t>(WIDTH) - 1;
        if (ahead >= -span && last <= span) return Vec::load(bias + ahead);
        float some[WIDTH];
        for (std::size_t i = 0; i < WIDTH; ++i)
            some[i] = bias[std::clamp(ahead + static_cast<std::int64_t>(i), -span, span)];
        return Vec::load(some);
    }

    // What to read of the values: all where every row sees every key, else what any row sees. Of a pair with one key that
    // is seen a copy is read, with zeros in the other's place: weights of 0 would not keep NaN away.
    void list_values(const std::int32_t* table, std::size_t head, std::int64_t key, std::size_t n, bool all) {
        num_values_ = 0;
        all = CODED || (all && n % PAIR == 0);  // codes are finite
        bool seen[STEP + 1] = {};
        if (!all) {
            for (std::size_t i = 0; i < count_; ++i) {
                const auto length = static_cast<std::int64_t>(n);
                const std::int64_t begin = std::clamp<std::int64_t>(rows_[i].begin - key, 0, length);
                const std::int64_t end = std::clamp<std::int64_t>(rows_[i].end - key, 0, length);
                if (i && rows_[i].begin == rows_[i - 1].begin && rows_[i].end == rows_[i - 1].end) continue;
                for (std::int64_t j = begin; j < end; ++j) seen[j] = true;
            }
        }
        for_pages(table, head, key, n, [&](const Stored* data, std::size_t offset, std::size_t part, std::size_t at) {
            data += a_.cache.scale_bytes() + a_.cache.block * size_;
            const std::size_t first = offset / PAIR, pairs = (part + PAIR - 1) / PAIR;
            if (all) {
                values_[num_values_++] = {data + first * size_ * PAIR, at, pairs};
                return;
            }
            if constexpr (CODED) return;
            bool follows = false;
            for (std::size_t pair = 0; pair < pairs; ++pair) {
                const std::size_t place = at + pair * PAIR;
                const bool even = seen[place], odd = PAIR == 1 || seen[place + 1];
                const auto* from = reinterpret_cast<const Cache*>(data) + (first + pair) * size_ * PAIR;
                if (even && odd) {
                    if (follows)
                        ++values_[num_values_ - 1].pairs;
                    else
                        values_[num_values_++] = {from, place, 1};
                } else if (even || (odd && PAIR == 2)) {
                    Cache* copy = clean_ + place * size_;
                    for (std::size_t i = 0; i < size_; ++i) {
                        copy[2 * i] = even ? from[2 * i] : Cache{};
                        copy[2 * i + 1] = even ? Cache{} : from[2 * i + 1];
                    }
                    values_[num_values_++] = {copy, place, 1};
                }
                follows = even && odd;
            }
        });
    }

    // sums [rows, size] = sums * factors + weights . values
    template <typename From>
    void multiply_values() {
        const std::size_t whole = size_ / WIDTH, rest = size_ % WIDTH;
        constexpr std::size_t MOST = WIDTH == 16 ? 2 * NR : WIDTH == 8 ? 4 * NR : NR;
        constexpr bool AHEAD = sizeof(typename From::Element) == sizeof(Stored);  // what was widened is in the cache
        for (std::size_t first = 0; first < whole;) {
            // Few rows: whole vectors at once, so that memory is read from its beginning to its end.
            const std::size_t most = count_ > MR / 2 ? NR : WIDTH == 8 ? MOST / count_ : MOST;
            const std::size_t n = std::min(most, whole - first);
            if (n > NR) {
                with_constant<MOST>(n, [&](auto wide) {
                    constexpr std::size_t N = decltype(wide)::value;
                    if constexpr (N > NR)
                        with_constant<WIDTH == 8 ? MOST / N : MR / 2>(count_, [&](auto rows) {
                            add<From, decltype(rows)::value, N, true, AHEAD>(0, first);
                        });
                });
            } else {
                with_constant<NR>(n, [&](auto wide) {
                    for_rows([&](auto rows, auto ahead, std::size_t row) {
                        add<From, decltype(rows)::value, decltype(wide)::value, true, decltype(ahead)::value>(row, first);
                    });
                });
            }
            first += n;
        }
        if (rest)
            for_rows([&](auto rows, auto, std::size_t row) {
                add<From, decltype(rows)::value, 1, false, false>(row, whole);
            });
    }

    template <typename From, std::size_t M, std::size_t N, bool FULL, bool AHEAD>
    void add(std::size_t row, std::size_t vector) const {
        using Element = typename From::Element;
        float* out = sums_.values + row * stride_ + vector * WIDTH;
        const Operand* weights = weights_ + row * SCORES;
        Vec sums[M][N];
        for (std::size_t m = 0; m < M; ++m) {
            const Vec factor = splat(factors_[row + m]);
            for (std::size_t n = 0; n < N; ++n) sums[m][n] = Vec::load(out + m * stride_ + n * WIDTH) * factor;
        }
        for (std::size_t run = 0; run < num_values_; ++run) {
            const Values& values = values_[run];
            const Element* data = static_cast<const Element*>(values.data) + vector * WIDTH * PAIR;
            const Operand* p = weights + values.at;
            std::ptrdiff_t ahead = 0;
            if constexpr (AHEAD)
                ahead = static_cast<const char*>(after_values(run)) - static_cast<const char*>(values.data);
            for (std::size_t pair = 0; pair < values.pairs; ++pair, data += size_ * PAIR, p += PAIR) {
                const auto load = [&](std::size_t n) {
                    if (AHEAD && n * WIDTH * PAIR * sizeof(Element) % 64 == 0)  // once a line
                        __builtin_prefetch(reinterpret_cast<const char*>(data + n * WIDTH * PAIR) + ahead, 0, LEVEL_2);
                    return FULL ? From::load(data + n * WIDTH * PAIR) : From::load(data, size_ % WIDTH);
                };
                if constexpr (M <= 2 && WIDTH == 8) {  // fewer registers hold weights than values
                    typename How::Spread spread[M];
                    for (std::size_t m = 0; m < M; ++m) spread[m] = How::spread(p + m * SCORES);
                    for (std::size_t n = 0; n < N; ++n) {
                        const typename How::Wide wide = load(n);
                        for (std::size_t m = 0; m < M; ++m) sums[m][n] = How::dot(sums[m][n], spread[m], wide);
                    }
                } else {
                    typename How::Wide wide[N];
                    for (std::size_t n = 0; n < N; ++n) wide[n] = load(n);
                    for (std::size_t m = 0; m < M; ++m) {
                        const typename How::Spread spread = How::spread(p + m * SCORES);
                        for (std::size_t n = 0; n < N; ++n) sums[m][n] = How::dot(sums[m][n], spread, wide[n]);
                    }
                }
            }
        }
        for (std::size_t m = 0; m < M; ++m)
            for (std::size_t n = 0; n < N; ++n) store(out + m * stride_ + n * WIDTH, sums[m][n]);
    }

    const AttentionForward& a_;
    std::size_t size_, head_bytes_, stride_, count_ = 0, num_keys_ = 0, num_values_ = 0;
    float scale_;
    bool plain_;
    Operand* queries_;
    float* scores_;
    Operand* weights_;
    Sums sums_, merged_;
    float* factors_;
    Cache* clean_;  // values without what is unseen; of codes what they stand for
    float *key_scales_, *value_scales_;
    void (*widen_)(const std::uint8_t*, bf16*, std::size_t, std::ptrdiff_t);
    QueryRow* rows_;
    Keys* keys_;
    const void* next_[NR] = {};  // of the next step
    Values* values_;
};

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
