#include <cstring>

#include "kernels.h"

namespace {

struct Choice {
  const Kernels* kernels;
  bool supported;
};

}  // namespace

const Kernels* find_kernels(const char* name, bool* known) {
#if defined(__x86_64__)
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const Choice choices[] = {
      {&avx512vnni_kernels, vnni}, {&avx512_kernels, avx512}, {&avx2_kernels, avx2}, {&portable_kernels, true}};
#else
  const Choice choices[] = {{&portable_kernels, true}};
#endif
  *known = *name == '\0';
  for (const Choice& choice : choices) {
    const bool wanted = *name == '\0' || std::strcmp(name, choice.kernels->isa) == 0;
    *known = *known || wanted;
    if (wanted && choice.supported) return choice.kernels;
  }
  return nullptr;
}
