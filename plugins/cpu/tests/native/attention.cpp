// Paged attention: keys and values written into scattered pages and read again, by every option.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"

namespace self_test {
namespace {

using engine_cpu::AttentionForward;
using engine_cpu::AttentionScratch;
using engine_cpu::AttentionWrite;
using engine_cpu::PagedCache;

struct Case {
    DType dtype, cached;  // of queries, and of the cache
    std::size_t heads, group, size, block;
    std::int64_t window;
    double soft_cap;
    bool sinks, slopes, index;
};

struct Row {
    std::size_t queries, keys;
};
// Decodes, drafts, a prompt's chunks; more queries than a tile has rows, and more keys than a segment.
constexpr Row ROWS[] = {{1, 1}, {1, 37}, {1, 700}, {4, 300}, {9, 9}, {50, 130}, {2, 129}, {1, 650}, {2, 690}};
constexpr std::size_t FIRST = 2, ALIKE[] = {7, 8}, KEYS = 600;  // rows that begin with as many keys of another one

// One step of rows, with everything that it reads.
class Step {
public:
    Step(const Case& c, Random& random) : c_(c), cache_(0), table_stride_((700 + c.block - 1) / c.block + 1) {
        std::size_t tokens = 0, keys = 0;
        for (const Row& row : ROWS) {
            starts_.push_back(static_cast<std::int32_t>(tokens));
            first_key_.push_back(keys);
            // without an index every query sees its own row's tokens: a row has as many keys as queries
            const std::size_t seen = c.index ? row.keys : row.queries;
            for (std::size_t q = 0; q < row.queries; ++q) index_.push_back(static_cast<std::int64_t>(seen - row.queries + q));
            tokens += row.queries;
            keys += seen;
            keys_.push_back(seen);
        }
        starts_.push_back(static_cast<std::int32_t>(tokens));
        // pages in no order, of which the last are nobody's; a row's table is filled up with one that does not exist
        std::size_t pages = 3;
        for (const std::size_t n : keys_) pages += (n + c.block - 1) / c.block;
        std::vector<std::int32_t> free(pages);
        for (std::size_t i = 0; i < pages; ++i) free[i] = static_cast<std::int32_t>(i);
        for (std::size_t i = pages - 1; i > 0; --i) std::swap(free[i], free[random.below(i + 1)]);
        table_.assign(std::size(ROWS) * table_stride_, 1 << 30);
        for (std::size_t r = 0; r < std::size(ROWS); ++r)
            for (std::size_t b = 0; b * c.block < keys_[r]; ++b) {
                table_[r * table_stride_ + b] = free.back();
                free.pop_back();
            }
        paged_ = {c.cached, nullptr, 0, c.heads, c.size, c.block};
        const std::size_t page = c.heads * paged_.head_bytes(), between = 8 * engine_cpu::size_of(c.cached);
        cache_ = Memory(pages * (page + between) - between);  // NaN, where nobody writes
        paged_.base = cache_.data();
        paged_.page_stride = page + between;
        q_.emplace_back(c.dtype, tokens * (q_stride() + 3) - 3, random);
        k_.emplace_back(c.dtype, keys * c.heads * c.size, random);
        v_.emplace_back(c.dtype, keys * c.heads * c.size, random);
        for (Array* x : {&k_[0], &v_[0]})
            for (const std::size_t r : ALIKE) {
                const std::size_t token = c.heads * c.size, n = std::min(KEYS, keys_[r]);
                if (n <= keys_[FIRST])
                    std::memcpy(x->at(first_key_[r] * token), x->at(first_key_[FIRST] * token),
                                n * token * engine_cpu::size_of(c.dtype));
            }
        for (std::size_t h = 0; h < c.heads * c.group; ++h) {
            sinks_.push_back(static_cast<float>(random.normal()));
            slopes_.push_back(static_cast<float>(0.02 * random.uniform()));
        }
        tokens_ = tokens;
    }

    void write(const Kernels& kernels) {
        std::vector<std::int64_t> slots;
        for (std::size_t r = 0; r < std::size(ROWS); ++r)
            for (std::size_t key = 0; key < keys_[r]; ++key)
                slots.push_back(table_[r * table_stride_ + key / c_.block] * static_cast<std::int64_t>(c_.block) +
                                static_cast<std::int64_t>(key % c_.block));
        const std::size_t head = c_.size, token = c_.heads * c_.size;
        kernels.attention_write({c_.dtype, k_[0].data(), token, head, v_[0].data(), token, head, slots.data(), slots.size(),
                                 paged_}, 2);
        expect(cache_.intact(), "attention_write wrote beyond the cache");
        kept_k_ = kept(k_[0]);
        kept_v_ = kept(v_[0]);
    }

    // Rows from .. to - 1, with some tokens of padding behind them.
    Array run(const Kernels& kernels, std::size_t from, std::size_t to, int threads, std::size_t padding, Array& lse) {
        std::vector<std::int32_t> starts;
        for (std::size_t r = from; r <= to; ++r) starts.push_back(starts_[r] - starts_[from]);
        const auto first = static_cast<std::size_t>(starts_[from]), tokens = static_cast<std::size_t>(starts.back());
        const std::size_t heads = c_.heads * c_.group;
        Array out(c_.dtype, (tokens + padding) * heads * c_.size);
        lse = Array(DType::float32, (tokens + padding) * heads);
        AttentionScratch scratch(threads, c_.size, c_.group, true);
        kernels.attention({c_.dtype, q_[0].at(first * (q_stride() + 3)), q_stride() + 3, c_.size, out.data(),
                           static_cast<float*>(lse.data()), starts.data(), table_.data() + from * table_stride_, table_stride_,
                           c_.index ? index_.data() + first : nullptr, to - from, tokens + padding, c_.group, paged_, scale(),
                           static_cast<float>(c_.soft_cap), c_.window, c_.sinks ? sinks_.data() : nullptr,
                           c_.slopes ? slopes_.data() : nullptr}, scratch, threads);
        expect(out.intact() && lse.intact() && cache_.intact(), "attention wrote beyond its end");
        return out;
    }

    void check(const Kernels& kernels, const char* what) {
        constexpr std::size_t PADDING = 2;
        const std::size_t heads = c_.heads * c_.group;
        Array lse(DType::float32, 0), other(DType::float32, 0);
        const Array out = run(kernels, 0, std::size(ROWS), 1, PADDING, lse);
        const Array threads = run(kernels, 0, std::size(ROWS), 3, PADDING, other);
        expect(out.same_bits(threads, out.size()) && lse.same_bits(other, lse.size()), "%s: other bits on 3 threads", what);
        for (std::size_t i = tokens_ * heads * c_.size; i < out.size(); ++i) expect(out[i] == 0, "%s: padding is not zero", what);
        for (std::size_t r = 0; r < std::size(ROWS); ++r) {
            const auto first = static_cast<std::size_t>(starts_[r]), n = static_cast<std::size_t>(starts_[r + 1]) - first;
            const Array alone = run(kernels, r, r + 1, 1, 0, other);
            Array same(c_.dtype, alone.size());
            std::memcpy(same.data(), const_cast<Array&>(out).at(first * heads * c_.size),
                        alone.size() * engine_cpu::size_of(c_.dtype));
            expect(alone.same_bits(same, alone.size()), "%s: row %zu has other bits alone", what, r);
            for (std::size_t t = first; t < first + n; ++t)
                for (std::size_t h = 0; h < heads; ++h) check_head(out, lse, r, t, h, what);
        }
        check_shared(kernels, out, lse, what);
    }

    // Where rows begin in the same pages they have the bits that they have in pages of their own.
    void check_shared(const Kernels& kernels, const Array& out, const Array& lse, const char* what) {
        const std::vector<std::int32_t> own = table_;
        for (const std::size_t r : ALIKE)
            for (std::size_t b = 0; (b + 1) * c_.block <= std::min(KEYS, keys_[r]); ++b)
                table_[r * table_stride_ + b] = table_[FIRST * table_stride_ + b];
        Array other(DType::float32, 0);
        for (const int threads : {1, 3}) {
            const Array shared = run(kernels, 0, std::size(ROWS), threads, 2, other);
            expect(out.same_bits(shared, out.size()) && lse.same_bits(other, lse.size()), "%s: other bits in shared pages", what);
        }
        table_ = own;
    }

    // A value that is not a number changes no bit of the tokens that do not see it, and gives the others none.
    void check_unseen(const Kernels& kernels, const char* what) {
        constexpr std::size_t ROW = 5;  // of 50 tokens
        const std::size_t heads = c_.heads * c_.group, key = keys_[ROW] - 10;
        Array lse(DType::float32, 0);
        const Array before = run(kernels, 0, std::size(ROWS), 1, 0, lse);
        for (std::size_t h = 0; h < c_.heads; ++h) v_[0].set(((first_key_[ROW] + key) * c_.heads + h) * c_.size, NAN);
        write(kernels);
        const Array after = run(kernels, 0, std::size(ROWS), 1, 0, lse);
        const auto first = static_cast<std::size_t>(starts_[ROW]), next = static_cast<std::size_t>(starts_[ROW + 1]);
        for (std::size_t i = 0; i < after.size(); ++i) {
            const std::size_t t = i / (heads * c_.size);
            const std::int64_t place = c_.index ? index_[t] : static_cast<std::int64_t>(t) - static_cast<std::int64_t>(first);
            const std::int64_t ahead = static_cast<std::int64_t>(key) - place;
            const bool sees = t >= first && t < next && (!c_.index || ahead <= 0) && (!c_.window || std::abs(ahead) < c_.window);
            if (sees)
                expect(std::isnan(after[i]), "%s: token %zu sees NaN, and is %g", what, t, after[i]);
            else
                expect(after[i] == before[i], "%s: token %zu does not see NaN, and is %g, not %g", what, t, after[i], before[i]);
        }
    }

private:
    std::size_t q_stride() const { return c_.heads * c_.group * c_.size; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(c_.size)); }

    // As the cache holds it.
    std::vector<double> kept(const Array& x) const {
        std::vector<double> found;
        for (std::size_t i = 0; i < x.size(); ++i)
            found.push_back(c_.cached == x.dtype() || paged_.coded() ? x[i] : rounded(c_.cached, x[i]));
        for (std::size_t i = 0; paged_.coded() && i < found.size(); i += c_.size) code(found.data() + i);
        return found;
    }

    // A vector in 8 bits, by the largest magnitude in it.
    void code(double* x) const {
        const bool whole = c_.cached == DType::int8;
        const double limit = whole ? 127 : 448;
        double most = 0;
        for (std::size_t i = 0; i < c_.size; ++i) most = std::max(most, std::fabs(x[i]));
        const double scale = rounded(DType::bfloat16, static_cast<float>(most) / static_cast<float>(limit));
        for (std::size_t i = 0; i < c_.size; ++i) {
            const double in = std::clamp(static_cast<double>(static_cast<float>(x[i]) / static_cast<float>(scale)), -limit, limit);
            const double unit = whole ? 1.0 : std::exp2(std::max(-6, std::ilogb(in)) - 3);  // of e4m3's last bit
            x[i] = scale == 0 ? 0 : std::nearbyint(in / unit) * unit * scale;
        }
    }

    void check_head(const Array& out, const Array& lse, std::size_t r, std::size_t t, std::size_t h, const char* what) const {
        const std::size_t n = keys_[r], size = c_.size, in_row = t - static_cast<std::size_t>(starts_[r]);
        const std::int64_t last = c_.index ? index_[t] : static_cast<std::int64_t>(n) - 1;
        const std::int64_t position = c_.index ? last : static_cast<std::int64_t>(in_row);
        const std::int64_t begin = c_.window ? std::max<std::int64_t>(0, position - c_.window + 1) : 0;
        const std::int64_t end = c_.window ? std::min(last + 1, position + c_.window) : last + 1;
        std::vector<double> scores;
        double top = c_.sinks ? static_cast<double>(sinks_[h]) : -INFINITY;
        const auto at = [&](std::int64_t key, std::size_t i) {
            return ((first_key_[r] + static_cast<std::size_t>(key)) * c_.heads + h / c_.group) * size + i;
        };
        for (std::int64_t key = begin; key < end; ++key) {
            double score = 0;
            for (std::size_t i = 0; i < size; ++i)
                score += q_[0][t * (q_stride() + 3) + h * size + i] * kept_k_[at(key, i)];
            score *= static_cast<double>(scale());
            if (c_.soft_cap != 0) score = c_.soft_cap * std::tanh(score / c_.soft_cap);
            if (c_.slopes) score -= static_cast<double>(slopes_[h]) * std::fabs(static_cast<double>(key - position));
            scores.push_back(score);
            top = std::max(top, score);
        }
        double total = c_.sinks ? std::exp(static_cast<double>(sinks_[h]) - top) : 0.0;
        for (const double score : scores) total += std::exp(score - top);
        // weights are rounded to bfloat16 where the queries are, as results are: by half of the last of 8 bits
        const double error = 3e-5 + (c_.dtype == DType::bfloat16 ? precision(c_.dtype) / 2 : 0);
        for (std::size_t i = 0; i < size; ++i) {
            double sum = 0, terms = 0;
            for (std::size_t j = 0; j < scores.size(); ++j) {
                const double term = std::exp(scores[j] - top) / total * kept_v_[at(begin + static_cast<std::int64_t>(j), i)];
                sum += term;
                terms += std::fabs(term);
            }
            const double found = out[(t * c_.heads * c_.group + h) * size + i];
            expect(close(found, sum, error * (terms + std::fabs(sum))), "%s: row %zu, token %zu, head %zu: %.9g, not %.9g", what, r,
                   in_row, h, found, sum);
        }
        expect(close(lse[t * c_.heads * c_.group + h], top + std::log(total), 1e-3), "%s: row %zu, lse %g, not %g", what, r,
               lse[t * c_.heads * c_.group + h], top + std::log(total));
    }

    Case c_;
    Memory cache_;
    std::size_t table_stride_, tokens_ = 0;
    std::vector<std::int32_t> starts_, table_;
    std::vector<std::int64_t> index_;
    std::vector<std::size_t> first_key_, keys_;
    std::vector<float> sinks_, slopes_;
    PagedCache paged_{};
    std::vector<Array> q_, k_, v_;  // one each
    std::vector<double> kept_k_, kept_v_;
};

}  // namespace

void test_attention(const Kernels& kernels) {
    constexpr DType SINGLE = DType::float32, HALF = DType::bfloat16, INT8 = DType::int8, FLOAT8 = DType::float8;
    // dtype, cache, heads, group, size, block, window, soft cap, sinks, slopes, index
    const std::pair<const char*, Case> cases[] = {
        {"float32", {SINGLE, SINGLE, 2, 3, 40, 16, 0, 0, false, false, true}},
        {"float32, odd sizes", {SINGLE, SINGLE, 1, 1, 7, 5, 0, 0, false, false, true}},
        {"float32, no index", {SINGLE, SINGLE, 1, 2, 64, 16, 0, 0, false, true, false}},
        {"float32, everything", {SINGLE, SINGLE, 1, 4, 33, 24, 50, 7, true, true, true}},
        {"float32, no index, window", {SINGLE, SINGLE, 1, 2, 24, 16, 9, 0, false, true, false}},
        {"bfloat16", {HALF, HALF, 2, 4, 64, 16, 0, 0, false, false, true}},
        {"bfloat16, odd sizes", {HALF, HALF, 1, 5, 22, 6, 0, 0, false, false, true}},
        {"bfloat16, no index", {HALF, HALF, 1, 1, 48, 32, 0, 0, true, false, false}},
        {"bfloat16, no index, window", {HALF, HALF, 2, 3, 48, 32, 20, 0, true, false, false}},
        {"bfloat16, window", {HALF, HALF, 1, 2, 80, 16, 33, 0, false, false, true}},
        {"bfloat16, everything", {HALF, HALF, 1, 7, 50, 40, 65, 4, true, true, true}},
        {"float32 over bfloat16", {SINGLE, HALF, 1, 6, 34, 16, 0, 0, false, false, true}},
        {"float32 over bfloat16, everything", {SINGLE, HALF, 2, 1, 18, 10, 21, 9, true, true, true}},
        {"bfloat16 over int8", {HALF, INT8, 2, 4, 64, 16, 0, 0, false, false, true}},
        {"bfloat16 over float8, everything", {HALF, FLOAT8, 1, 7, 50, 40, 65, 4, true, true, true}},
        {"float32 over int8, everything", {SINGLE, INT8, 2, 1, 18, 10, 21, 9, true, true, true}},
        {"float32 over float8, no index", {SINGLE, FLOAT8, 1, 6, 34, 24, 0, 0, false, false, false}},
    };
    Random random(3);
    for (const auto& [what, c] : cases) {
        Step step(c, random);
        step.write(kernels);
        step.check(kernels, what);
        step.check_unseen(kernels, what);
    }
}

}  // namespace self_test
