#include "trap.h"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "levels/amx/emulated.h"

namespace self_test {
namespace {

using engine_cpu::emulated::TileConfig;
using engine_cpu::emulated::TileUnit;

thread_local TileUnit unit;
std::atomic<unsigned long> count{0};

// In the order of the encoding.
constexpr int REGISTERS[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                             REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// An instruction with a VEX prefix of three bytes, from its first byte on (volume 2 of Intel's manual, chapter 2.3).
class Instruction {
public:
    Instruction(const std::uint8_t* bytes, const greg_t* registers) : bytes_(bytes), registers_(registers) { decode(); }

    // Whether it is one of AMX's, and was done.
    bool run() const {
        if (bytes_[0] != 0xc4 || (bytes_[1] & 31) != 2 || (bytes_[2] & 0x84) != 0) return false;  // map 0f38, W0, 128 bits
        const int prefix = bytes_[2] & 3;                                                           // none, 66, f3, f2
        const bool memory = mode_ != 3;
        switch (bytes_[3]) {
            case 0x49:
                if (prefix == 0 && memory) return configure();
                if (prefix == 0 && bytes_[4] == 0xc0) return unit.release(), true;
                return prefix == 3 && !memory && rm_ == 0 && unit.zero(reg_);
            case 0x4b:
                if (!memory || rm_ != 4) return false;
                if (prefix == 3) return unit.load(reg_, reinterpret_cast<const void*>(base_), index_);
                return prefix == 2 && unit.store(reg_, reinterpret_cast<void*>(base_), index_);
            case 0x5c:
                return prefix == 2 && !memory && unit.dot_bf16(reg_, rm_, second());
            case 0x5e:
                return prefix == 2 && !memory && unit.dot_signed_unsigned(reg_, rm_, second());
        }
        return false;
    }
    std::size_t length() const { return length_; }

private:
    void decode() {
        const std::uint8_t modrm = bytes_[4];
        mode_ = modrm >> 6;
        reg_ = modrm >> 3 & 7;
        rm_ = modrm & 7;
        length_ = 5;
        if (mode_ == 3) return;
        const bool wide_base = (bytes_[1] & 0x20) == 0, wide_index = (bytes_[1] & 0x40) == 0;
        int base = rm_;
        if (rm_ == 4) {
            const std::uint8_t sib = bytes_[length_++];
            base = sib & 7;
            const int index = (sib >> 3 & 7) + 8 * wide_index;
            if (index != 4) index_ = registers_[REGISTERS[index]] << (sib >> 6);
        }
        if (mode_ == 0 && (base & 7) == 5) {  // no base: relative to the next instruction, which no SIB has
            base_ = displacement(4);
            if (rm_ == 5) base_ += reinterpret_cast<std::intptr_t>(bytes_) + static_cast<std::intptr_t>(length_);
            return;
        }
        base_ = registers_[REGISTERS[base + 8 * wide_base]];
        if (mode_) base_ += displacement(mode_ == 1 ? 1 : 4);
    }
    std::intptr_t displacement(std::size_t size) {
        std::int32_t wide = 0;
        std::memcpy(&wide, bytes_ + length_, size);
        length_ += size;
        return size == 1 ? static_cast<std::int8_t>(wide) : wide;
    }
    std::size_t second() const { return ~(bytes_[2] >> 3) & 15; }
    bool configure() const {
        TileConfig config;
        std::memcpy(&config, reinterpret_cast<const void*>(base_ + index_), sizeof config);
        return unit.configure(config);
    }

    const std::uint8_t* bytes_;
    const greg_t* registers_;
    int mode_, rm_;
    std::size_t reg_, length_;
    std::intptr_t base_ = 0, index_ = 0;
};

void handle(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const Instruction instruction(reinterpret_cast<const std::uint8_t*>(registers[REG_RIP]), registers);
    if (!instruction.run()) {
        constexpr char SAID[] = "an instruction that the processor would not do, either\n";
        static_cast<void>(!write(STDERR_FILENO, SAID, sizeof SAID - 1));
        _exit(3);
    }
    count.fetch_add(1, std::memory_order_relaxed);
    registers[REG_RIP] += static_cast<greg_t>(instruction.length());
}

}  // namespace

void trap_amx() {
    struct sigaction action {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
}

unsigned long trapped() { return count.load(); }

}  // namespace self_test
