// core_tests [--whole] SUITE... runs the suites (see check.h for --whole). Without a suite, it lists all suites.
#include <cstdio>
#include <string_view>

#include "check.h"

int main(int argc, char** argv) {
  using namespace mscomm::test;
  if (argc < 2) {
    for (const auto& [name, run] : suites()) std::printf("%s\n", name.c_str());
    return 2;
  }
  for (int i = 1; i < argc; i++) {
    if (argv[i] == std::string_view("--whole")) {
      only_races = false;
      continue;
    }
    const auto found = suites().find(argv[i]);
    if (found == suites().end()) {
      std::fprintf(stderr, "core_tests: there is no suite %s\n", argv[i]);
      return 2;
    }
    found->second();
  }
  return failed();
}
