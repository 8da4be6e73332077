// CHECK(expression) prints the expression if it is false, and continues. A test's main() ends with `return test::failed();`.
#pragma once

#include <atomic>
#include <cstdio>

namespace mscomm::test {

inline std::atomic<int> failures{0};

inline bool check(bool ok, const char* file, int line, const char* expression) {
  if (!ok) {
    std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", file, line, expression);
    ++failures;
  }
  return ok;
}

inline int failed() { return failures > 0; }

}  // namespace mscomm::test

#define CHECK(...) ::mscomm::test::check(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)
