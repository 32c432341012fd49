// Waiting for another thread of the same pool, which is at work and needs microseconds.
#pragma once

#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace oscar {

// Spins until done() holds. Gives the processor up only after a while: on a machine with other programs, that costs a time
// slice, a hundred times what is usually waited for.
template <class F>
void wait_until(F&& done) {
  constexpr int kSpins = 20000;  // some hundred microseconds
  for (int spins = 0; !done(); ++spins) {
    if (spins > kSpins) {
      std::this_thread::yield();
      continue;
    }
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

}  // namespace oscar
