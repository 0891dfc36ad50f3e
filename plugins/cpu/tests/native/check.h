// What the self-test's parts share: arrays with guarded ends, random numbers, and a count of what went wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace self_test {

using engine_cpu::DType;
using engine_cpu::Kernels;

// Uniform and normal numbers (splitmix64, Box and Muller): the same on every machine.
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
    std::uint64_t bits();
    double uniform();  // in [0, 1)
    double normal();
    std::size_t below(std::size_t n) { return static_cast<std::size_t>(bits() % n); }

private:
    std::uint64_t state_;
};

// Memory for `bytes`, of ones at first: NaN in every float. In front of it are more of them, which must stay; behind it is
// memory that nobody may touch, so that who reads or writes beyond the end is ended.
class Memory {
public:
    explicit Memory(std::size_t bytes);
    Memory(const Memory& other);
    Memory& operator=(Memory other);
    ~Memory();
    template <typename T = void>
    T* data() {
        return reinterpret_cast<T*>(start_);
    }
    std::size_t bytes() const { return bytes_; }
    bool intact() const;

private:
    std::size_t bytes_, mapped_;
    std::uint8_t *base_, *start_;
};

// Numbers of a dtype, NaN at first. What is put in is rounded to nearest even.
class Array {
public:
    Array(DType dtype, std::size_t count) : dtype_(dtype), count_(count), memory_(count * engine_cpu::size_of(dtype)) {}
    Array(DType dtype, std::size_t count, Random& random, double scale = 1.0) : Array(dtype, count) {
        for (std::size_t i = 0; i < count; ++i) set(i, random.normal() * scale);
    }
    double operator[](std::size_t i) const;
    void set(std::size_t i, double value);
    void* data() { return memory_.data<void>(); }
    void* at(std::size_t i) { return memory_.data<std::uint8_t>() + i * engine_cpu::size_of(dtype_); }
    DType dtype() const { return dtype_; }
    std::size_t size() const { return count_; }
    bool intact() const { return memory_.intact(); }
    bool same_bits(const Array& other, std::size_t count) const;

private:
    DType dtype_;
    std::size_t count_;
    Memory memory_;
};

// Counts a check of the part that is under way, and says so where it fails.
void expect(bool right, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Whether `found` is within `tolerance` of `expected`; false where one is NaN and the other is not.
bool close(double found, double expected, double tolerance);

// The step from a number of the dtype to the next, of the number: half of it is the error of rounding.
double precision(DType dtype);
// The number of the dtype (float64, float32, bfloat16) that is nearest.
double rounded(DType dtype, double value);
// A float16's number, of its bits.
double from_half(std::uint16_t bits);
const char* name_of(DType dtype);

// Begins a part; returns how many checks the last one had. `failures()`: in all parts.
void begin(const std::string& part);
std::size_t checks();
std::size_t failures();

// The parts: `kernels` against double precision, and against `scalar` where bits must be the same.
void test_linear(const Kernels& kernels, const Kernels& scalar);
void test_layers(const Kernels& kernels, const Kernels& scalar);
void test_attention(const Kernels& kernels);
void test_sampling(const Kernels& kernels);
void test_states(const Kernels& kernels);
void test_experts(const Kernels& kernels);

}  // namespace self_test
