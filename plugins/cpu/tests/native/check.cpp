#include "check.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace self_test {
namespace {

constexpr std::size_t SHOWN = 20;   // failures
constexpr std::size_t FRONT = 256;  // bytes in front of a memory

std::string part_;
std::size_t checks_ = 0, failures_ = 0;

std::uint16_t to_bf16(double value) {
    const auto single = static_cast<float>(value);
    std::uint32_t bits;
    std::memcpy(&bits, &single, 4);
    if (std::isnan(value)) return 0x7fc0;
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

std::uint64_t Random::bits() {
    std::uint64_t x = state_ += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * M_PI * uniform());
}

Memory::Memory(std::size_t bytes) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t inside = (bytes + FRONT + page - 1) / page * page;
    mapped_ = inside + page;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(static_cast<std::uint8_t*>(memory) + inside, page, PROT_NONE) != 0) std::abort();
    base_ = static_cast<std::uint8_t*>(memory);
    start_ = base_ + inside - bytes;
    std::memset(base_, 0xff, inside);
}

Memory::Memory(const Memory& other) : Memory(other.bytes_) { std::memcpy(start_, other.start_, bytes_); }

Memory& Memory::operator=(Memory other) {
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    std::swap(base_, other.base_);
    std::swap(start_, other.start_);
    return *this;
}

Memory::~Memory() { munmap(base_, mapped_); }

bool Memory::intact() const {
    return std::all_of(base_, start_, [](std::uint8_t byte) { return byte == 0xff; });
}

double Array::operator[](std::size_t i) const {
    const void* at = const_cast<Array*>(this)->at(i);
    const auto read = [at](auto value) {
        std::memcpy(&value, at, sizeof value);
        return value;
    };
    switch (dtype_) {
        case DType::float64:
            return read(double{});
        case DType::float32:
            return read(float{});
        case DType::bfloat16: {
            const std::uint32_t bits = static_cast<std::uint32_t>(read(std::uint16_t{})) << 16;
            float value;
            std::memcpy(&value, &bits, 4);
            return value;
        }
        case DType::float16:
            return from_half(read(std::uint16_t{}));
        default:
            std::abort();
    }
}

void Array::set(std::size_t i, double value) {
    const auto write = [this, i](auto stored) { std::memcpy(at(i), &stored, sizeof stored); };
    switch (dtype_) {
        case DType::float64:
            return write(value);
        case DType::float32:
            return write(static_cast<float>(value));
        case DType::bfloat16:
            return write(to_bf16(value));
        default:
            std::abort();
    }
}

bool Array::same_bits(const Array& other, std::size_t count) const {
    return std::memcmp(const_cast<Array*>(this)->data(), const_cast<Array&>(other).data(),
                       count * engine_cpu::size_of(dtype_)) == 0;
}

void expect(bool right, const char* format, ...) {
    ++checks_;
    if (right) return;
    if (++failures_ > SHOWN) return;
    std::va_list arguments;
    va_start(arguments, format);
    std::printf("WRONG %s: ", part_.c_str());
    std::vprintf(format, arguments);
    std::printf("\n");
    va_end(arguments);
}

bool close(double found, double expected, double tolerance) {
    if (std::isnan(found) || std::isnan(expected)) return std::isnan(found) && std::isnan(expected);
    if (std::isinf(expected)) return found == expected;
    return std::fabs(found - expected) <= tolerance;
}

double precision(DType dtype) { return dtype == DType::bfloat16 ? 0x1p-7 : 0x1p-23; }
double rounded(DType dtype, double value) {
    if (dtype == DType::float64) return value;
    if (dtype == DType::float32) return static_cast<float>(value);
    const std::uint32_t bits = static_cast<std::uint32_t>(to_bf16(value)) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

double from_half(std::uint16_t bits) {
    const int exponent = bits >> 10 & 31;
    const double mantissa = bits & 1023, sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

const char* name_of(DType dtype) { return dtype == DType::bfloat16 ? "bfloat16" : "float32"; }

void begin(const std::string& part) {
    part_ = part;
    checks_ = 0;
}
std::size_t checks() { return checks_; }
std::size_t failures() { return failures_; }

}  // namespace self_test
