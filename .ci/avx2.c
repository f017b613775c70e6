// A CPU with AVX2 and no AVX-512 or AMX, for programs that run with this library preloaded: .ci/as-avx2 does so.
//
// Libraries choose their kernels by the instruction `cpuid`. Linux can make it fault (arch_prctl, on CPUs with the flag
// cpuid_fault); a handler then runs the instruction, and clears the features that such a CPU lacks.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

// Leaf 7 of cpuid. EBX: AVX512F, DQ, IFMA, PF, ER, CD, BW, VL.
#define EBX_AVX512 (1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31)
// ECX: AVX512 VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; GFNI, VAES, VPCLMULQDQ.
#define ECX_NEWER (1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14 | 1u << 8 | 1u << 9 | 1u << 10)
// EDX: AVX512 4VNNIW, 4FMAPS, VP2INTERSECT, FP16; AMX-BF16, AMX-TILE, AMX-INT8.
#define EDX_NEWER (1u << 2 | 1u << 3 | 1u << 8 | 1u << 23 | 1u << 22 | 1u << 24 | 1u << 25)
#define XSAVE_X87_SSE_AVX 7u

static int (*set_handler)(int, const struct sigaction *, struct sigaction *);
static struct sigaction programs_handler;  // of the program that runs here, for its own faults

static void cpuid_faults(int enabled) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, !enabled); }

static void answer_cpuid(greg_t *registers) {
  unsigned leaf = registers[REG_RAX], subleaf = registers[REG_RCX], eax, ebx, ecx, edx;
  cpuid_faults(0);
  __cpuid_count(leaf, subleaf, eax, ebx, ecx, edx);
  cpuid_faults(1);
  if (leaf == 0x07 && subleaf == 0) {
    ebx &= ~EBX_AVX512;
    ecx &= ~ECX_NEWER;
    edx &= ~EDX_NEWER;
  } else if (leaf == 0x0d && subleaf == 0) {
    eax &= XSAVE_X87_SSE_AVX;
  } else if (leaf == 0x07 || leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {  // AVX-VNNI, BF16; AMX; AVX10
    eax = ebx = ecx = edx = 0;
  }
  registers[REG_RAX] = eax;
  registers[REG_RBX] = ebx;
  registers[REG_RCX] = ecx;
  registers[REG_RDX] = edx;
  registers[REG_RIP] += 2;
}

static void on_fault(int number, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  if (info->si_code == SI_KERNEL && memcmp((void *)registers[REG_RIP], "\x0f\xa2", 2) == 0)
    answer_cpuid(registers);
  else if (programs_handler.sa_flags & SA_SIGINFO)
    programs_handler.sa_sigaction(number, info, context);
  else if (programs_handler.sa_handler != SIG_DFL && programs_handler.sa_handler != SIG_IGN)
    programs_handler.sa_handler(number);
  else
    set_handler(SIGSEGV, &programs_handler, NULL);  // the instruction faults again, and ends the process
}

int sigaction(int number, const struct sigaction *handler, struct sigaction *before) {
  if (!set_handler) set_handler = dlsym(RTLD_NEXT, "sigaction");
  if (number != SIGSEGV) return set_handler(number, handler, before);
  if (before) *before = programs_handler;
  if (handler) programs_handler = *handler;
  return 0;
}

__attribute__((constructor)) static void start(void) {
  struct sigaction handler = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
  if (!set_handler) set_handler = dlsym(RTLD_NEXT, "sigaction");
  set_handler(SIGSEGV, &handler, NULL);
  cpuid_faults(1);
}
