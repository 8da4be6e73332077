// Memory fences. ThreadSanitizer does not support them, so a build with ThreadSanitizer has none.
#pragma once

#include <atomic>

namespace mscomm {

#if defined(__SANITIZE_THREAD__)  // GCC
inline constexpr bool thread_sanitizer = true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)  // Clang
inline constexpr bool thread_sanitizer = true;
#else
inline constexpr bool thread_sanitizer = false;
#endif
#else
inline constexpr bool thread_sanitizer = false;
#endif

// Calls std::atomic_thread_fence(order). Does nothing in a build with ThreadSanitizer.
inline void fence([[maybe_unused]] std::memory_order order) {
  if constexpr (!thread_sanitizer) std::atomic_thread_fence(order);
}

}  // namespace mscomm
