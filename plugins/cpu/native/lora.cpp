#include "lora.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace engine_cpu {
namespace {

constexpr std::size_t ROWS = 64;     // tokens of one adapter that are computed together
constexpr std::size_t PANELS = 16;   // of a part's outputs that are computed together

// Some tokens of one adapter.
struct Piece {
    const std::uint64_t* place;
    std::size_t begin, count;
};

// Memory of a thread, which keeps it.
std::uint8_t* memory(std::size_t which, std::size_t bytes) {
    thread_local std::vector<std::uint8_t> kept[3];
    if (kept[which].size() < bytes) kept[which].resize(bytes);
    return kept[which].data();
}

Format format_of(DType dtype) { return dtype == DType::float32 ? Format::float32 : Format::bfloat16; }

}  // namespace

void lora(const Kernels& kernels, const Lora& a, int threads) {
    const auto all = static_cast<std::size_t>(a.starts[a.places]);
    if (!all) return;
    const std::size_t item = size_of(a.dtype), words = LORA_WORDS + a.parts * LORA_PART_WORDS;
    thread_local std::vector<Piece> made;
    std::vector<Piece>& pieces = made;
    pieces.clear();
    for (std::size_t place = 1; place <= a.places; ++place) {
        const std::uint64_t* found = a.table + place * words;
        const auto end = static_cast<std::size_t>(a.starts[place]);
        if (!found[1]) continue;
        for (auto begin = static_cast<std::size_t>(a.starts[place - 1]); begin < end; begin += ROWS)
            pieces.push_back({found, begin, std::min(ROWS, end - begin)});
    }
    const Format format = format_of(a.dtype);
    const auto* x = static_cast<const std::uint8_t*>(a.x);
    auto* y = static_cast<std::uint8_t*>(a.y);
    auto* inner = static_cast<std::uint8_t*>(a.inner);
    const Piece* first_piece = pieces.data();
    parallel_for(threads, pieces.size(), 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t index = begin; index < end; ++index) {
            const Piece& piece = first_piece[index];
            const auto rank = static_cast<std::size_t>(piece.place[1]);
            const Layout layout{format, rank, a.inputs, 0};
            const std::size_t bytes = a.inputs * item;
            std::uint8_t* gathered = memory(0, piece.count * bytes);
            for (std::size_t row = 0; row < piece.count; ++row)
                std::memcpy(gathered + row * bytes,
                            x + static_cast<std::size_t>(a.tokens[piece.begin + row]) * a.x_stride * item, bytes);
            kernels.packed({layout, a.dtype, gathered, a.inputs, piece.count,
                            reinterpret_cast<const void*>(piece.place[0]), nullptr, nullptr,
                            inner + piece.begin * a.most_rank * item, memory(1, layout.scratch_bytes(piece.count))},
                           1);
        }
    });
    std::size_t groups = 0;  // of panels, of all parts
    for (std::size_t part = 0; part < a.parts; ++part)
        groups += (static_cast<std::size_t>(a.outputs[part]) + PANELS * PANEL - 1) / (PANELS * PANEL);
    parallel_for(threads, pieces.size() * groups, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t index = begin; index < end; ++index) {
            const Piece& piece = first_piece[index / groups];
            std::size_t group = index % groups, part = 0, column = 0;
            for (;; ++part) {
                const auto outputs = static_cast<std::size_t>(a.outputs[part]);
                const std::size_t own = (outputs + PANELS * PANEL - 1) / (PANELS * PANEL);
                if (group < own) break;
                group -= own;
                column += outputs;
            }
            const std::uint64_t* of_part = piece.place + LORA_WORDS + part * LORA_PART_WORDS;
            const auto rank = static_cast<std::size_t>(of_part[1]), offset = static_cast<std::size_t>(of_part[2]);
            if (!rank) continue;
            const std::size_t from = group * PANELS * PANEL;
            const std::size_t size = std::min(PANELS * PANEL, static_cast<std::size_t>(a.outputs[part]) - from);
            const Layout layout{format, size, rank, 0};
            const auto whole_rank = static_cast<std::size_t>(piece.place[1]);
            std::uint8_t* product = memory(2, piece.count * size * item);
            kernels.packed({layout, a.dtype, inner + (piece.begin * a.most_rank + offset) * item, whole_rank, piece.count,
                            reinterpret_cast<const std::uint8_t*>(of_part[0]) + group * PANELS * layout.panel_bytes(),
                            nullptr, nullptr, product, memory(1, layout.scratch_bytes(piece.count))},
                           1);
            for (std::size_t row = 0; row < piece.count; ++row) {
                const auto token = static_cast<std::size_t>(a.tokens[piece.begin + row]);
                void* to = y + (token * a.y_stride + column + from) * item;
                const void* added[2] = {to, product + row * size * item};
                kernels.sum(a.dtype, to, added, 2, size);
            }
        }
    });
}

}  // namespace engine_cpu
