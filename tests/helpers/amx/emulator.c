/* An emulator of AMX for chips without it, to be loaded with LD_PRELOAD.

An AMX instruction raises SIGILL on such chips. The handler decodes it, does what Intel's manual
says (Software Developer's Manual, volume 2, and volume 1, chapter 18), and goes on behind it. So a
program's own machine code runs, at about a microsecond per tile instruction. Each thread has its
own tiles, as on a chip.

AMX_EMULATION says how the kernel answers a request for permission (arch_prctl): "granted",
"denied", "full" (no room on a thread's signal stack), or "retracted" (granted in words only).
Whatever would be a fault on a chip, or a
tile instruction without permission, ends the program with a line that says why.

amx_counts() returns how many instructions of each kind were emulated, see COUNTED.
*/
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, MAX_ROWS = 16, ROW_BYTES = 64, TILE_DATA = 18 };
enum { ARCH_GET_XCOMP_SUPP = 0x1021, ARCH_GET_XCOMP_PERM = 0x1022, ARCH_REQ_XCOMP_PERM = 0x1023 };
/* COUNTED: kinds of instructions. */
enum { CONFIGURE, STORE_CONFIG, RELEASE, ZERO, LOAD, STORE, PRODUCT, KINDS };
enum { NO_PREFIX, PREFIX_66, PREFIX_F3, PREFIX_F2 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Config;

typedef struct {
    Config config;
    uint8_t data[TILES][MAX_ROWS][ROW_BYTES];
} State;

typedef struct {
    int prefix, opcode, mod, reg, rm, other;
    const uint8_t *next;         /* the instruction behind this one */
    uint64_t address, stride;    /* of a memory operand */
    int has_sib;
} Instruction;

static __thread State state __attribute__((tls_model("initial-exec")));
static int permitted;
static uint64_t counts[KINDS];

static void fail(int signal_number, const char *why) {
    static const char start[] = "AMX emulator: ";
    (void)!write(2, start, sizeof start - 1);
    (void)!write(2, why, strlen(why));
    (void)!write(2, "\n", 1);
    signal(signal_number, SIG_DFL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, signal_number);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    raise(signal_number);
    _exit(1);
}

/* ---- decoding ---- */

static uint64_t register_value(const ucontext_t *context, int number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                  REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                  REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)context->uc_mcontext.gregs[order[number]];
}

static int32_t read_i32(const uint8_t *at) {
    int32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Decode a VEX instruction of map 0F38 with W0 and 128 bits; return whether it may be AMX. */
static int decode(const ucontext_t *context, Instruction *out) {
    const uint8_t *at = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    if (at[0] != 0xC4 || (at[1] & 0x1F) != 2 || (at[2] & 0x84) != 0) return 0;
    int extend_reg = !(at[1] & 0x80), extend_index = !(at[1] & 0x40), extend_base = !(at[1] & 0x20);
    out->prefix = at[2] & 3;
    out->other = (~at[2] >> 3) & 15;
    out->opcode = at[3];
    if (out->opcode != 0x49 && out->opcode != 0x4B && out->opcode != 0x5C && out->opcode != 0x5E)
        return 0;
    uint8_t modrm = at[4];
    at += 5;
    out->mod = modrm >> 6;
    out->reg = (modrm >> 3 & 7) + 8 * extend_reg;
    out->rm = modrm & 7;
    out->has_sib = 0;
    out->address = out->stride = 0;
    if (out->mod == 3) {
        out->rm += 8 * extend_base;
        out->next = at;
        return 1;
    }
    int base = out->rm, relative = 0, absolute = 0;
    if (out->rm == 4) {
        uint8_t sib = *at++;
        int index = (sib >> 3 & 7) + 8 * extend_index;
        out->has_sib = 1;
        base = sib & 7;
        if (index != 4) out->stride = register_value(context, index) << (sib >> 6);
        absolute = base == 5 && out->mod == 0;
    } else {
        relative = base == 5 && out->mod == 0;
    }
    int64_t displacement = 0;
    if (out->mod == 1) {
        displacement = (int8_t)*at++;
    } else if (out->mod == 2 || relative || absolute) {
        displacement = read_i32(at);
        at += 4;
    }
    out->next = at;
    out->address = (uint64_t)displacement;
    if (relative)
        out->address += (uint64_t)at;
    else if (!absolute)
        out->address += register_value(context, base + 8 * extend_base);
    return 1;
}

/* ---- what the instructions do ---- */

static void load_config(const uint8_t *at) {
    Config config;
    memcpy(&config, at, sizeof config);
    memset(&state, 0, sizeof state);
    if (config.palette == 0) return;
    if (config.palette != 1) fail(SIGSEGV, "LDTILECFG of an unknown palette");
    for (int i = 0; i < 14; i++)
        if (config.reserved[i]) fail(SIGSEGV, "LDTILECFG with reserved bytes that are not 0");
    for (int i = 0; i < 16; i++) {
        int rows = config.rows[i], row_bytes = config.row_bytes[i];
        if (i >= TILES && (rows || row_bytes)) fail(SIGSEGV, "LDTILECFG of a tile beyond the last");
        if (rows > MAX_ROWS || row_bytes > ROW_BYTES) fail(SIGSEGV, "LDTILECFG of too large a tile");
        if (!rows != !row_bytes) fail(SIGSEGV, "LDTILECFG of a tile with half a shape");
    }
    state.config = config;
}

static void check_tile(int tile) {
    if (state.config.palette == 0) fail(SIGILL, "a tile instruction before LDTILECFG");
    if (tile >= TILES) fail(SIGILL, "a tile beyond the last");
    if (!state.config.rows[tile]) fail(SIGILL, "a tile without a shape");
}

static void load_tile(int tile, uint64_t address, uint64_t stride) {
    memset(state.data[tile], 0, sizeof state.data[tile]);
    for (int row = 0; row < state.config.rows[tile]; row++)
        memcpy(state.data[tile][row], (const void *)(address + (uint64_t)row * stride),
               state.config.row_bytes[tile]);
}

static void store_tile(int tile, uint64_t address, uint64_t stride) {
    for (int row = 0; row < state.config.rows[tile]; row++)
        memcpy((void *)(address + (uint64_t)row * stride), state.data[tile][row],
               state.config.row_bytes[tile]);
}

static float flushed(float value) { return fpclassify(value) == FP_SUBNORMAL ? 0.0f * value : value; }

static float widened(const uint8_t *at) {
    uint32_t bits = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 24;
    float value;
    memcpy(&value, &bits, sizeof value);
    return flushed(value);
}

static void multiply_bytes(int to, int a, int b, int a_signed, int b_signed) {
    int inner = state.config.row_bytes[a] / 4, width = state.config.row_bytes[to] / 4;
    for (int m = 0; m < state.config.rows[to]; m++)
        for (int n = 0; n < width; n++) {
            uint32_t sum;
            memcpy(&sum, &state.data[to][m][4 * n], sizeof sum);
            for (int k = 0; k < inner; k++)
                for (int i = 0; i < 4; i++) {
                    uint8_t x = state.data[a][m][4 * k + i], y = state.data[b][k][4 * n + i];
                    int32_t left = a_signed ? (int8_t)x : x, right = b_signed ? (int8_t)y : y;
                    sum += (uint32_t)(left * right);
                }
            memcpy(&state.data[to][m][4 * n], &sum, sizeof sum);
        }
}

static void multiply_bfloats(int to, int a, int b) {
    int inner = state.config.row_bytes[a] / 4, width = state.config.row_bytes[to] / 4;
    for (int m = 0; m < state.config.rows[to]; m++)
        for (int n = 0; n < width; n++) {
            float parts[2] = {0.0f, 0.0f}, sum;
            for (int k = 0; k < inner; k++)
                for (int i = 0; i < 2; i++) {
                    float x = widened(&state.data[a][m][4 * k + 2 * i]);
                    float y = widened(&state.data[b][k][4 * n + 2 * i]);
                    parts[i] = flushed(fmaf(x, y, parts[i]));
                }
            memcpy(&sum, &state.data[to][m][4 * n], sizeof sum);
            sum = flushed(flushed(sum) + flushed(parts[0] + parts[1]));
            memcpy(&state.data[to][m][4 * n], &sum, sizeof sum);
        }
}

static void multiply(const Instruction *in) {
    int to = in->reg, a = in->rm, b = in->other;
    check_tile(to), check_tile(a), check_tile(b);
    const Config *config = &state.config;
    if (to == a || to == b || a == b) fail(SIGILL, "a product of tiles that are the same");
    if (config->row_bytes[to] % 4 || config->row_bytes[a] % 4 || config->row_bytes[b] % 4)
        fail(SIGILL, "a product of tiles whose rows are not whole fours of bytes");
    if (config->rows[to] != config->rows[a] || config->row_bytes[to] != config->row_bytes[b] ||
        config->row_bytes[a] / 4 != config->rows[b])
        fail(SIGILL, "a product of tiles whose shapes do not fit");
    if (in->opcode == 0x5C) {
        multiply_bfloats(to, a, b);
        return;
    }
    multiply_bytes(to, a, b, in->prefix == PREFIX_F2 || in->prefix == PREFIX_F3,
                   in->prefix == PREFIX_F2 || in->prefix == PREFIX_66);
}

/* Carry out an instruction; return its kind, or KINDS if it is none of AMX. */
static int execute(const Instruction *in) {
    int in_memory = in->mod != 3;
    if (in->opcode == 0x49 && in->other == 0) {
        if (in_memory && in->reg == 0 && in->prefix == NO_PREFIX) {
            load_config((const uint8_t *)in->address);
            return CONFIGURE;
        }
        if (in_memory && in->reg == 0 && in->prefix == PREFIX_66) {
            memcpy((void *)in->address, &state.config, sizeof state.config);
            return STORE_CONFIG;
        }
        if (!in_memory && in->reg == 0 && in->rm == 0 && in->prefix == NO_PREFIX) {
            memset(&state, 0, sizeof state);
            return RELEASE;
        }
        if (!in_memory && in->rm == 0 && in->prefix == PREFIX_F2) {
            check_tile(in->reg);
            memset(state.data[in->reg], 0, sizeof state.data[in->reg]);
            return ZERO;
        }
    }
    if (in->opcode == 0x4B && in_memory && in->has_sib && in->other == 0 && in->prefix != NO_PREFIX) {
        check_tile(in->reg);
        if (in->prefix == PREFIX_F3) {
            store_tile(in->reg, in->address, in->stride);
            return STORE;
        }
        load_tile(in->reg, in->address, in->stride);
        return LOAD;
    }
    if (!in_memory && (in->opcode == 0x5E || (in->opcode == 0x5C && in->prefix == PREFIX_F3))) {
        multiply(in);
        return PRODUCT;
    }
    return KINDS;
}

static void on_illegal_instruction(int number, siginfo_t *information, void *data) {
    (void)information;
    ucontext_t *context = data;
    Instruction instruction;
    if (!decode(context, &instruction)) fail(number, "an illegal instruction that is none of AMX");
    if (!permitted) fail(number, "a tile instruction without permission");
    int kind = execute(&instruction);
    if (kind == KINDS) fail(number, "an illegal instruction that is none of AMX");
    __atomic_add_fetch(&counts[kind], 1, __ATOMIC_RELAXED);
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)instruction.next;
}

/* ---- the kernel's side ---- */

static long forwarded(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

static long answer(long component) {
    const char *said = getenv("AMX_EMULATION");
    if (said != NULL && strcmp(said, "full") == 0) {
        errno = ENOSPC;
        return -1;
    }
    if (said != NULL && component == TILE_DATA) {
        permitted = strcmp(said, "granted") == 0;
        if (permitted || strcmp(said, "retracted") == 0) return 0;
    }
    errno = EPERM;
    return -1;
}

/* In the place of the C library's: only requests for permission are answered here. */
long syscall(long number, ...) {
    va_list given;
    va_start(given, number);
    long a = va_arg(given, long), b = va_arg(given, long), c = va_arg(given, long);
    long d = va_arg(given, long), e = va_arg(given, long), f = va_arg(given, long);
    va_end(given);
    if (number == SYS_arch_prctl && a == ARCH_REQ_XCOMP_PERM) return answer(b);
    if (number == SYS_arch_prctl && (a == ARCH_GET_XCOMP_SUPP || a == ARCH_GET_XCOMP_PERM)) {
        *(uint64_t *)b = (a == ARCH_GET_XCOMP_SUPP || permitted ? 3ull << 17 : 0) | 7;
        return 0;
    }
    return forwarded(number, a, b, c, d, e, f);
}

const uint64_t *amx_counts(void) { return counts; }

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {0};
    action.sa_sigaction = on_illegal_instruction;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, NULL);
}
