#include "states.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "levels/functions.h"
#include "levels/lanes.h"
#include "levels/table.h"
#include "parallel.h"

namespace engine_cpu::ENGINE_CPU_LEVEL {
namespace {

constexpr std::size_t WIDE = 4;                     // registers of columns that are computed side by side
constexpr std::size_t COLUMNS = WIDE * Vec::WIDTH;  // in them
constexpr std::size_t CHANNELS = 256;               // of a convolution, taken at once
constexpr float UNIT_EPS = 1e-6f;                   // added to the squares of a query's or key's elements

template <typename T>
const T* at(const void* base, std::size_t offset) {
    return static_cast<const T*>(base) + offset;
}
template <typename T>
T* at(void* base, std::size_t offset) {
    return static_cast<T*>(base) + offset;
}

// log(1 + e^x), good to a few units in the last place: log1p(u) = 2 atanh(u / (2 + u)), by its series.
constexpr float ATANH[] = {1.0f / 17, 1.0f / 15, 1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f};

inline Vec softplus(Vec x) {
    const Vec u = exponential(splat(0.0f) - magnitude(x));
    const Vec z = u / (splat(2.0f) + u), square = z * z;
    Vec p = splat(ATANH[0]);
    for (std::size_t i = 1; i < 9; ++i) p = Vec::fma(p, square, splat(ATANH[i]));
    return maximum(splat(0.0f), x) + splat(2.0f) * z * p;
}
inline float first(Vec x) {
    float lanes[Vec::WIDTH];
    store(lanes, x);
    return lanes[0];
}
inline float softplus(float x) { return first(softplus(splat(x))); }
inline float decay(float x) { return first(exponential(splat(x))); }  // e^x for x <= 0
inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

inline Vec silu(Vec x) {
    const Vec minus = splat(0.0f) - x;
    return x / (splat(1.0f) + exponential(below(minus, 88.0f, minus, splat(88.0f))));
}

// The columns that are computed side by side: so many registers of them, or fewer than one holds.
template <std::size_t N>
struct Whole {
    static constexpr std::size_t COUNT = N;
    template <typename T>
    Vec load(const T* p, std::size_t j) const {  // the j-th register's
        return Vec::load(p + j * Vec::WIDTH);
    }
    template <typename T>
    void save(T* p, std::size_t j, Vec x) const {
        store(p + j * Vec::WIDTH, x);
    }
    std::size_t columns() const { return N * Vec::WIDTH; }
};
struct Part {
    static constexpr std::size_t COUNT = 1;
    std::size_t n;
    template <typename T>
    Vec load(const T* p, std::size_t) const {
        return Vec::load(p, n);
    }
    void save(float* p, std::size_t, Vec x) const { store(p, x, n); }
    void save(bf16* p, std::size_t, Vec x) const {
        float part[Vec::WIDTH];
        store(part, x);
        for (std::size_t i = 0; i < n; ++i) p[i] = narrow<bf16>(part[i]);
    }
    std::size_t columns() const { return n; }
};

// Calls body(lanes, first) for columns first .. first + lanes.columns() - 1, which together are begin .. end - 1.
template <typename Body>
void over_columns(std::size_t begin, std::size_t end, Body&& body) {
    for (; begin + COLUMNS <= end; begin += COLUMNS) body(Whole<WIDE>{}, begin);
    for (; begin + Vec::WIDTH <= end; begin += Vec::WIDTH) body(Whole<1>{}, begin);
    if (begin < end) body(Part{end - begin}, begin);
}

// n elements as floats: where they lie, if they are; else in `room`.
inline const float* floats(const float* p, std::size_t, float*) { return p; }
inline const float* floats(const bf16* p, std::size_t n, float* room) {
    for (std::size_t i = 0; i < n; ++i) room[i] = widen(p[i]);
    return room;
}

// One row's tokens, and the state before them.
struct Row {
    Row(const StatePlaces& p, std::size_t row)
        : places(p), begin(row), end(row + 1), mark(row), marks(row + 1), before(p.read[row]) {
        if (p.query_start_loc == nullptr) return;
        begin = static_cast<std::size_t>(p.query_start_loc[row]);
        end = static_cast<std::size_t>(p.query_start_loc[row + 1]);
        const auto place = [&p](std::size_t token) {
            return static_cast<std::size_t>(
                std::lower_bound(p.kept_at, p.kept_at + p.count, static_cast<std::int64_t>(token)) - p.kept_at);
        };
        mark = place(begin);
        marks = place(end);
    }
    // The place of the i-th state that is left.
    template <typename S>
    S* kept(std::size_t i) const {
        return at<S>(places.kept, static_cast<std::size_t>(places.kept_to[i]) * places.kept_stride);
    }
    // Where the only state goes of a row of one token; else null.
    template <typename S>
    S* only() const {
        return end - begin == 1 && marks - mark == 1 ? kept<S>(mark) : nullptr;
    }
    // Calls save(place) for each state that is left after a token; `next` is the first mark that has not come yet.
    template <typename S, typename Save>
    void leave(std::size_t token, std::size_t& next, Save&& save) const {
        for (; next < marks && (places.kept_at == nullptr || places.kept_at[next] == static_cast<std::int64_t>(token)); ++next)
            save(kept<S>(next));
    }

    const StatePlaces& places;
    std::size_t begin, end, mark, marks;
    std::int64_t before;
};

// Some columns of a state [height, width], from token to token of a row. The state lies in the pool before the first
// token, and then in memory of this thread; that of a row of one token goes straight to where it is left.
template <typename Lanes>
class Columns {
public:
    Columns(const Row& row, std::size_t offset, std::size_t height, std::size_t width, Lanes lanes, float* room)
        : row_(row), lanes_(lanes), offset_(offset), height_(height), width_(width), room_(room), next_(row.mark) {
        from_ = row.before < 0 ? room : at<float>(row.places.pool, static_cast<std::size_t>(row.before) * row.places.pool_stride + offset);
        from_stride_ = row.before < 0 ? COLUMNS : width;
        if (row.before < 0) std::memset(room, 0, height * COLUMNS * sizeof(float));
        float* only = row.only<float>();
        to_ = only == nullptr ? room : only + offset;
        to_stride_ = only == nullptr ? COLUMNS : width;
        direct_ = only != nullptr;
    }
    const float* from(std::size_t i) const { return from_ + i * from_stride_; }
    float* to(std::size_t i) const { return to_ + i * to_stride_; }
    // The token has been computed: its state is where `to` says.
    void done(std::size_t token) {
        if (direct_) return;
        from_ = room_;
        from_stride_ = COLUMNS;
        row_.leave<float>(token, next_, [this](float* place) {
            for (std::size_t i = 0; i < height_; ++i)
                std::memcpy(place + offset_ + i * width_, room_ + i * COLUMNS, lanes_.columns() * sizeof(float));
        });
    }

private:
    const Row& row_;
    Lanes lanes_;
    std::size_t offset_, height_, width_;
    float* room_;
    std::size_t next_;
    const float* from_;
    float* to_;
    std::size_t from_stride_, to_stride_;
    bool direct_;
};

// A thread's memory for what it computes with.
float* room_for(std::size_t count) {
    static thread_local std::vector<float> room;
    if (room.size() < count) room.resize(count);
    return room.data();
}

template <typename T>
void conv_rows(const CausalConv& a, int threads) {
    const std::size_t past_rows = a.kernel - 1, blocks = (a.channels + CHANNELS - 1) / CHANNELS;
    parallel_for(threads, a.places.rows * blocks, 1, [&](std::size_t begin, std::size_t end) {
        static thread_local std::vector<T> room;
        if (room.size() < past_rows * CHANNELS) room.resize(past_rows * CHANNELS);
        T* past = room.data();
        float sum[CHANNELS];
        float* weights = room_for((a.kernel + 1) * CHANNELS);  // and the bias
        for (std::size_t item = begin; item < end; ++item) {
            const Row row(a.places, item / blocks);
            const std::size_t channel = item % blocks * CHANNELS, width = std::min(CHANNELS, a.channels - channel);
            if (row.before < 0)
                std::memset(past, 0, past_rows * CHANNELS * sizeof(T));
            else
                for (std::size_t i = 0; i < past_rows; ++i)
                    std::memcpy(past + i * CHANNELS,
                                at<T>(a.places.pool, static_cast<std::size_t>(row.before) * a.places.pool_stride +
                                                         i * a.channels + channel),
                                width * sizeof(T));
            const auto input = [&](std::size_t t, std::size_t k) {  // x[t - kernel + 1 + k]
                return t + k < row.begin + past_rows ? past + (t - row.begin + k) * CHANNELS
                                                     : at<T>(a.x, (t + k - past_rows) * a.x_stride + channel);
            };
            std::memset(weights, 0, CHANNELS * sizeof(float));
            if (a.bias != nullptr)
                for (std::size_t j = 0; j < width; ++j) weights[j] = widen(at<T>(a.bias, channel)[j]);
            for (std::size_t k = 0; k < a.kernel; ++k)
                for (std::size_t j = 0; j < width; ++j)
                    weights[(k + 1) * CHANNELS + j] = widen(at<T>(a.weight, k * a.weight_stride + channel)[j]);
            std::size_t next = row.mark;
            for (std::size_t t = row.begin; t < row.end; ++t) {
                std::memcpy(sum, weights, width * sizeof(float));
                for (std::size_t k = 0; k < a.kernel; ++k) {
                    const T* x = input(t, k);
                    const float* weight = weights + (k + 1) * CHANNELS;
                    for (std::size_t j = 0; j < width; ++j) sum[j] += widen(x[j]) * weight[j];
                }
                T* out = at<T>(a.out, t * a.channels + channel);
                for (std::size_t j = 0; j < width; ++j) out[j] = narrow<T>(sum[j] / (1.0f + exponential(-sum[j])));
                row.leave<T>(t, next, [&](T* place) {
                    for (std::size_t i = 0; i < past_rows; ++i)
                        std::memcpy(place + i * a.channels + channel, input(t, i + 1), width * sizeof(T));
                });
            }
        }
    });
}

template <typename T, typename Lanes>
void ssd_columns(const Ssd& a, const Row& row, std::size_t head, std::size_t column, Lanes lanes, float* room) {
    constexpr std::size_t N = Lanes::COUNT;
    const std::size_t group = head / (a.heads / a.groups) * a.state;
    float *b_room = room, *c_room = room + a.state;
    Columns<Lanes> state(row, head * a.state * a.size + column, a.state, a.size, lanes, c_room + a.state);
    for (std::size_t t = row.begin; t < row.end; ++t) {
        const float dt = widen(at<T>(a.dt, t * a.dt_stride)[head]) + a.dt_bias[head];
        const float step = std::min(std::max(softplus(dt), a.dt_low), a.dt_high);
        const Vec fade = splat(decay(step * a.a[head]));
        const float* b = floats(at<T>(a.b, t * a.b_stride + group), a.state, b_room);
        const float* c = floats(at<T>(a.c, t * a.c_stride + group), a.state, c_room);
        const T* x_at = at<T>(a.x, t * a.x_stride + head * a.size + column);
        T* out_at = at<T>(a.out, (t * a.heads + head) * a.size + column);
        Vec x[N], added[N], y[N];
        for (std::size_t j = 0; j < N; ++j) {
            x[j] = lanes.load(x_at, j);
            added[j] = x[j] * splat(step);
            y[j] = Vec::zero();
        }
        for (std::size_t i = 0; i < a.state; ++i) {
            const Vec in = splat(b[i]), out = splat(c[i]);
            const float* from = state.from(i);
            float* to = state.to(i);
            for (std::size_t j = 0; j < N; ++j) {
                const Vec s = Vec::fma(lanes.load(from, j), fade, in * added[j]);
                y[j] = Vec::fma(s, out, y[j]);
                lanes.save(to, j, s);
            }
        }
        for (std::size_t j = 0; j < N; ++j) lanes.save(out_at, j, Vec::fma(x[j], splat(a.d[head]), y[j]));
        state.done(t);
    }
}

template <typename T>
void ssd_rows(const Ssd& a, int threads) {
    parallel_for(threads, a.places.rows * a.heads, 1, [&](std::size_t begin, std::size_t end) {
        float* room = room_for(a.state * (2 + COLUMNS));
        for (std::size_t item = begin; item < end; ++item) {
            const Row row(a.places, item / a.heads);
            over_columns(0, a.size, [&](auto lanes, std::size_t column) {
                ssd_columns<T>(a, row, item % a.heads, column, lanes, room);
            });
        }
    });
}

template <typename T, typename Lanes>
void scan_columns(const SelectiveScan& a, const Row& row, std::size_t channel, Lanes lanes, float* room) {
    constexpr std::size_t N = Lanes::COUNT;
    float *b_room = room, *c_room = room + a.state;
    Columns<Lanes> state(row, channel, a.state, a.channels, lanes, c_room + a.state);
    for (std::size_t t = row.begin; t < row.end; ++t) {
        const float* b = floats(at<T>(a.b, t * a.b_stride), a.state, b_room);
        const float* c = floats(at<T>(a.c, t * a.c_stride), a.state, c_room);
        const T* x_at = at<T>(a.x, t * a.x_stride + channel);
        const T* dt_at = at<T>(a.dt, t * a.dt_stride + channel);
        const T* gate_at = at<T>(a.gate, t * a.gate_stride + channel);
        T* out_at = at<T>(a.out, t * a.channels + channel);
        Vec x[N], step[N], y[N];
        for (std::size_t j = 0; j < N; ++j) {
            x[j] = lanes.load(x_at, j);
            step[j] = softplus(lanes.load(dt_at, j));
            y[j] = Vec::zero();
        }
        for (std::size_t i = 0; i < a.state; ++i) {
            const float *from = state.from(i), *rates = a.a + i * a.channels + channel;
            float* to = state.to(i);
            for (std::size_t j = 0; j < N; ++j) {
                const Vec fade = exponential(step[j] * lanes.load(rates, j));
                const Vec s = Vec::fma(lanes.load(from, j), fade, splat(b[i]) * (step[j] * x[j]));
                y[j] = Vec::fma(s, splat(c[i]), y[j]);
                lanes.save(to, j, s);
            }
        }
        for (std::size_t j = 0; j < N; ++j) {
            const Vec whole = Vec::fma(x[j], lanes.load(a.d + channel, j), y[j]);
            lanes.save(out_at, j, whole * silu(lanes.load(gate_at, j)));
        }
        state.done(t);
    }
}

template <typename T>
void scan_rows(const SelectiveScan& a, int threads) {
    const std::size_t blocks = (a.channels + COLUMNS - 1) / COLUMNS;
    parallel_for(threads, a.places.rows * blocks, 1, [&](std::size_t begin, std::size_t end) {
        float* room = room_for(a.state * (2 + COLUMNS));
        for (std::size_t item = begin; item < end; ++item) {
            const Row row(a.places, item / blocks);
            const std::size_t channel = item % blocks * COLUMNS;
            over_columns(channel, std::min(channel + COLUMNS, a.channels), [&](auto lanes, std::size_t column) {
                scan_columns<T>(a, row, column, lanes, room);
            });
        }
    });
}

// A vector made as long as `length`.
template <typename T>
void unit(const T* x, std::size_t size, float length, float* out) {
    Vec sum = Vec::zero();
    over_columns(0, size, [&](auto lanes, std::size_t i) {
        for (std::size_t j = 0; j < lanes.COUNT; ++j) {
            const Vec part = lanes.load(x + i, j);
            sum = Vec::fma(part, part, sum);
        }
    });
    const float factor = length / std::sqrt(sum.sum() + UNIT_EPS);
    for (std::size_t i = 0; i < size; ++i) out[i] = widen(x[i]) * factor;
}

template <typename T, typename Lanes>
void delta_columns(const GatedDelta& a, const Row& row, std::size_t head, std::size_t column, Lanes lanes, float* room) {
    constexpr std::size_t N = Lanes::COUNT;
    const std::size_t size = a.key_size, key = head / (a.heads / a.key_heads) * size;
    float *q = room, *k = room + size;
    Columns<Lanes> state(row, head * size * a.value_size + column, size, a.value_size, lanes, k + size);
    const float length = 1.0f / std::sqrt(static_cast<float>(size));
    for (std::size_t t = row.begin; t < row.end; ++t) {
        const float dt = widen(at<T>(a.dt, t * a.dt_stride)[head]) + a.dt_bias[head];
        const Vec fade = splat(decay(softplus(dt) * a.a[head]));
        const Vec beta = splat(sigmoid(widen(at<T>(a.beta, t * a.beta_stride)[head])));
        unit(at<T>(a.q, t * a.q_stride + key), size, length, q);
        unit(at<T>(a.k, t * a.k_stride + key), size, 1.0f, k);
        Vec change[N], y[N], odd[N];  // what the key gives, of every second of its elements
        for (std::size_t j = 0; j < N; ++j) change[j] = y[j] = odd[j] = Vec::zero();
        const auto reads = [&](std::size_t i, Vec* sum) {
            const float* from = state.from(i);
            for (std::size_t j = 0; j < N; ++j) sum[j] = Vec::fma(lanes.load(from, j), splat(k[i]), sum[j]);
        };
        for (std::size_t i = 0; i + 1 < size; i += 2) {
            reads(i, change);
            reads(i + 1, odd);
        }
        if (size % 2) reads(size - 1, change);
        const T* v = at<T>(a.v, t * a.v_stride + head * a.value_size + column);
        for (std::size_t j = 0; j < N; ++j) change[j] = beta * (lanes.load(v, j) - fade * (change[j] + odd[j]));
        for (std::size_t i = 0; i < size; ++i) {
            const float* from = state.from(i);
            float* to = state.to(i);
            for (std::size_t j = 0; j < N; ++j) {
                const Vec s = Vec::fma(lanes.load(from, j), fade, splat(k[i]) * change[j]);
                y[j] = Vec::fma(s, splat(q[i]), y[j]);
                lanes.save(to, j, s);
            }
        }
        T* out_at = at<T>(a.out, (t * a.heads + head) * a.value_size + column);
        for (std::size_t j = 0; j < N; ++j) lanes.save(out_at, j, y[j]);
        state.done(t);
    }
}

template <typename T>
void delta_rows(const GatedDelta& a, int threads) {
    parallel_for(threads, a.places.rows * a.heads, 1, [&](std::size_t begin, std::size_t end) {
        float* room = room_for(a.key_size * (2 + COLUMNS));
        for (std::size_t item = begin; item < end; ++item) {
            const Row row(a.places, item / a.heads);
            over_columns(0, a.value_size, [&](auto lanes, std::size_t column) {
                delta_columns<T>(a, row, item % a.heads, column, lanes, room);
            });
        }
    });
}

}  // namespace

void causal_conv(DType dtype, const CausalConv& a, int threads) {
    dtype == DType::bfloat16 ? conv_rows<bf16>(a, threads) : conv_rows<float>(a, threads);
}
void ssd(DType dtype, const Ssd& a, int threads) {
    dtype == DType::bfloat16 ? ssd_rows<bf16>(a, threads) : ssd_rows<float>(a, threads);
}
void selective_scan(DType dtype, const SelectiveScan& a, int threads) {
    dtype == DType::bfloat16 ? scan_rows<bf16>(a, threads) : scan_rows<float>(a, threads);
}
void gated_delta(DType dtype, const GatedDelta& a, int threads) {
    dtype == DType::bfloat16 ? delta_rows<bf16>(a, threads) : delta_rows<float>(a, threads);
}

}  // namespace engine_cpu::ENGINE_CPU_LEVEL
