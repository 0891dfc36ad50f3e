// From the blocks of a file to panels (blocks.h). The formats are ggml's (ggml-common.h names the fields).
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "packing.h"
#include "parallel.h"

namespace engine_cpu {
namespace {

constexpr std::size_t MOST = 256;  // inputs of a block

// One block, taken apart.
struct Block {
    std::uint8_t codes[MOST];
    std::uint8_t numbers[32];  // of the groups' scales, then of their minima
    std::uint8_t scale[2], minimum[2];  // float16
};

void copy2(std::uint8_t* to, const std::uint8_t* from) { std::memcpy(to, from, 2); }

// Codes of which a byte has two: the first half of every `run` inputs in the lower bits.
void nibbles(const std::uint8_t* from, std::size_t inputs, std::size_t run, std::uint8_t* codes) {
    for (std::size_t at = 0; at < inputs; at += run, from += run / 2)
        for (std::size_t i = 0; i < run / 2; ++i) {
            codes[at + i] = from[i] & 15;
            codes[at + run / 2 + i] = from[i] >> 4;
        }
}

// Two bits of which a byte has four, of inputs that are 32 apart.
void pairs(const std::uint8_t* from, int shift, std::uint8_t* codes) {
    for (std::size_t at = 0; at < MOST; at += 128, from += 32)
        for (std::size_t s = 0; s < 4; ++s)
            for (std::size_t i = 0; i < 32; ++i)
                codes[at + 32 * s + i] |= static_cast<std::uint8_t>((from[i] >> 2 * s & 3) << shift);
}

// One bit of which a byte has eight, of inputs that are 32 apart.
void singles(const std::uint8_t* from, int shift, std::uint8_t* codes) {
    for (std::size_t s = 0; s < 8; ++s)
        for (std::size_t i = 0; i < 32; ++i)
            codes[32 * s + i] |= static_cast<std::uint8_t>((from[i] >> s & 1) << shift);
}

void fifth_bits(const std::uint8_t* from, std::uint8_t* codes) {
    for (std::size_t i = 0; i < 32; ++i) codes[i] |= static_cast<std::uint8_t>((from[i / 8] >> i % 8 & 1) << 4);
}

// The 8 scales and 8 minima of q4_k and q5_k, 6 bits each.
void scales_and_minima(const std::uint8_t* s, std::uint8_t* numbers) {
    for (std::size_t j = 0; j < 4; ++j) {
        numbers[j] = s[j] & 63;
        numbers[4 + j] = static_cast<std::uint8_t>((s[8 + j] & 15) | (s[j] >> 2 & 48));
        numbers[8 + j] = s[4 + j] & 63;
        numbers[12 + j] = static_cast<std::uint8_t>(s[8 + j] >> 4 | (s[4 + j] >> 2 & 48));
    }
}

void take_apart(Format format, const std::uint8_t* b, Block& to) {
    switch (format) {
        case Format::q4_0:
        case Format::iq4_nl:
            copy2(to.scale, b);
            return nibbles(b + 2, 32, 32, to.codes);
        case Format::q4_1:
            copy2(to.scale, b);
            copy2(to.minimum, b + 2);
            return nibbles(b + 4, 32, 32, to.codes);
        case Format::q5_0:
            copy2(to.scale, b);
            nibbles(b + 6, 32, 32, to.codes);
            return fifth_bits(b + 2, to.codes);
        case Format::q5_1:
            copy2(to.scale, b);
            copy2(to.minimum, b + 2);
            nibbles(b + 8, 32, 32, to.codes);
            return fifth_bits(b + 4, to.codes);
        case Format::q8_0:
            copy2(to.scale, b);
            for (std::size_t i = 0; i < 32; ++i) to.codes[i] = b[2 + i] ^ 0x80;  // 128 more
            return;
        case Format::q2_k:
            for (std::size_t g = 0; g < 16; ++g) {
                to.numbers[g] = b[g] & 15;
                to.numbers[16 + g] = b[g] >> 4;
            }
            std::memset(to.codes, 0, MOST);
            pairs(b + 16, 0, to.codes);
            copy2(to.scale, b + 80);
            return copy2(to.minimum, b + 82);
        case Format::q3_k: {
            std::memset(to.codes, 0, MOST);
            singles(b, 2, to.codes);
            pairs(b + 32, 0, to.codes);
            const std::uint8_t* s = b + 96;
            for (std::size_t g = 0; g < 16; ++g)
                to.numbers[g] = static_cast<std::uint8_t>((g < 8 ? s[g] & 15 : s[g - 8] >> 4) |
                                                          (s[8 + g % 4] >> 2 * (g / 4) & 3) << 4);
            return copy2(to.scale, b + 108);
        }
        case Format::q4_k:
            copy2(to.scale, b);
            copy2(to.minimum, b + 2);
            scales_and_minima(b + 4, to.numbers);
            return nibbles(b + 16, MOST, 64, to.codes);
        case Format::q5_k:
            copy2(to.scale, b);
            copy2(to.minimum, b + 2);
            scales_and_minima(b + 4, to.numbers);
            nibbles(b + 48, MOST, 64, to.codes);
            return singles(b + 16, 4, to.codes);
        case Format::q6_k:
            nibbles(b, MOST, 128, to.codes);
            pairs(b + 128, 4, to.codes);
            std::memcpy(to.numbers, b + 192, 16);
            return copy2(to.scale, b + 208);
        case Format::iq4_xs: {
            copy2(to.scale, b);
            const unsigned high = b[2] | b[3] << 8;
            for (std::size_t g = 0; g < 8; ++g)
                to.numbers[g] = static_cast<std::uint8_t>((b[4 + g / 2] >> 4 * (g % 2) & 15) | (high >> 2 * g & 3) << 4);
            return nibbles(b + 8, MOST, 32, to.codes);
        }
        default:
            throw std::logic_error("no format of blocks");
    }
}

void put_numbers(const BlockForm& form, const Block (&blocks)[PANEL], std::uint8_t* to) {
    const std::size_t rows = form.rows_of_numbers();
    for (std::size_t lane = 0; lane < PANEL; ++lane) {
        const std::uint8_t* numbers = blocks[lane].numbers;
        if (form.numbers == Numbers::of_8) {
            for (std::size_t r = 0; r < rows; ++r) to[r * PANEL + lane] = numbers[r];
            continue;
        }
        for (std::size_t r = 0; r < rows / 2; ++r)
            to[r * PANEL + lane] = static_cast<std::uint8_t>((numbers[r] & 15) | (numbers[r + rows / 2] & 15) << 4);
        if (form.numbers == Numbers::of_4) continue;
        std::uint8_t* upper = to + rows / 2 * PANEL;
        for (std::size_t r = 0; r < rows / 4; ++r) {
            unsigned four = 0;
            for (std::size_t k = 0; k < 4; ++k) four |= static_cast<unsigned>(numbers[r + k * rows / 4] >> 4) << 2 * k;
            upper[r * PANEL + lane] = static_cast<std::uint8_t>(four);
        }
    }
}

// 16 inputs of a panel, from input `at` of each block on: four at a time, as the bytes of a word.
void put_codes(const BlockForm& form, const Block (&blocks)[PANEL], std::size_t at, std::uint8_t* to) {
    constexpr std::size_t HALF = PANEL / 2;
    constexpr std::uint32_t EACH = 0x01010101u;
    std::uint8_t* one = to;
    std::uint8_t* two = one + (form.one < 0 ? 0 : 64);
    std::uint8_t* lower = two + (form.two < 0 ? 0 : 128);
    for (std::size_t lane = 0; lane < HALF; ++lane) {
        std::uint32_t singles = 0, pairs[2] = {};
        for (std::size_t u = 0; u < 4; ++u) {
            std::uint32_t first, second;  // of outputs `lane` and 16 + `lane`
            std::memcpy(&first, blocks[lane].codes + at + u * 4, 4);
            std::memcpy(&second, blocks[HALF + lane].codes + at + u * 4, 4);
            if (form.as_bytes) {
                std::memcpy(to + (u * PANEL + lane) * 4, &first, 4);
                std::memcpy(to + (u * PANEL + HALF + lane) * 4, &second, 4);
            }
            if (form.nibbles) {
                const std::uint32_t both = (first & 15 * EACH) | (second & 15 * EACH) << 4;
                std::memcpy(lower + u * 64 + lane * 4, &both, 4);
            }
            if (form.two >= 0)
                pairs[u / 2] |= ((first >> form.two & 3 * EACH) | (second >> form.two & 3 * EACH) << 2) << 4 * (u % 2);
            if (form.one >= 0) singles |= ((first >> form.one & EACH) | (second >> form.one & EACH) << 1) << 2 * u;
        }
        if (form.two >= 0)
            for (std::size_t p = 0; p < 2; ++p) std::memcpy(two + p * 64 + lane * 4, &pairs[p], 4);
        if (form.one >= 0) std::memcpy(one + lane * 4, &singles, 4);
    }
}

void pack_panel(const Layout& layout, const std::uint8_t* weight, std::size_t stride, std::size_t panel,
                std::uint8_t* to) {
    const BlockForm form = layout.block();
    Block blocks[PANEL];
    std::memset(blocks, 0, sizeof blocks);
    const std::size_t there = std::min(PANEL, layout.outputs - panel * PANEL);
    for (std::size_t b = 0; b < layout.inputs / form.inputs; ++b) {
        for (std::size_t lane = 0; lane < there; ++lane)
            take_apart(layout.format, weight + (panel * PANEL + lane) * stride + b * form.bytes, blocks[lane]);
        for (std::size_t lane = 0; lane < PANEL; ++lane) copy2(to + lane * 2, blocks[lane].scale);
        to += PANEL * 2;
        if (form.minima) {
            for (std::size_t lane = 0; lane < PANEL; ++lane) copy2(to + lane * 2, blocks[lane].minimum);
            to += PANEL * 2;
        }
        put_numbers(form, blocks, to);
        to += form.number_bytes();
        for (std::size_t at = 0; at < form.inputs; at += 16, to += form.code_bytes()) put_codes(form, blocks, at, to);
    }
}

}  // namespace

void pack_blocks(const Layout& layout, const void* weight, std::size_t stride, void* packed, int threads) {
    if (!in_blocks(layout.format) || layout.inputs % layout.block().inputs)
        throw std::invalid_argument("the inputs are no whole blocks");
    parallel_for(threads, layout.panels(), 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t panel = begin; panel < end; ++panel)
            pack_panel(layout, static_cast<const std::uint8_t*>(weight), stride, panel,
                       static_cast<std::uint8_t*>(packed) + panel * layout.panel_bytes());
    });
}

}  // namespace engine_cpu
