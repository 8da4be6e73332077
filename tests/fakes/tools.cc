// Defines small functions. Each stand-in library contains its own copy of them.
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "engine.h"

namespace fake {

int64_t number(const char* name, int64_t otherwise) {
  const char* value = getenv(name);
  return value && *value ? strtoll(value, nullptr, 10) : otherwise;
}

std::string text(const char* name, const std::string& otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

size_t hand_over(const std::string& json, char* to, size_t bytes) {
  if (to && bytes) {
    const size_t copied = std::min(bytes - 1, json.size());
    memcpy(to, json.data(), copied);
    to[copied] = 0;
  }
  return json.size() + 1;
}

void spawn(std::function<void()> body) {
  // Block all signals in the new thread, because Python's signal handlers must run on Python's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(std::move(body)).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace fake
