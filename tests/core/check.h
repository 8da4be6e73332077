// SUITE(name) { ... } defines the tests that `core_tests name` runs. CHECK(expression) prints the expression if it is false, and
// continues.
#pragma once

#include <atomic>
#include <cstdio>
#include <map>
#include <string>

#include "base/fence.h"

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

// Under ThreadSanitizer, each step takes ten times longer, but a race does not depend on the length of the data. So the tests
// then use fewer ranks, sizes and repeats: those that still reach every branch. The run under AddressSanitizer checks the results
// for all of them. `core_tests --whole` uses all of them under ThreadSanitizer, too.
inline bool only_races = thread_sanitizer;

inline std::map<std::string, void (*)()>& suites() {
  static std::map<std::string, void (*)()> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*run)()) { suites()[name] = run; }
};

}  // namespace mscomm::test

#define CHECK(...) ::mscomm::test::check(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, #__VA_ARGS__)

#define SUITE(name)                                                               \
  static void suite_##name();                                                     \
  static const ::mscomm::test::Registered registered_##name{#name, suite_##name}; \
  static void suite_##name()
