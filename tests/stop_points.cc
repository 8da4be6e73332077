// Tests preload this library into a rank. It replaces the functions below.
//
// A thread that calls stop_points_arm() chooses a function, a number and a signal. When the thread calls the function for the
// chosen time, the library first sends the signal to the process. The signal is SIGKILL or SIGSTOP. After SIGSTOP, another
// process continues this one with SIGCONT.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // for RTLD_NEXT; g++ defines it
#endif

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstring>

namespace {

thread_local char chosen[32] = "";  // the name of the function; empty if this thread does not count calls
thread_local long left = 0;         // how many calls until the signal
thread_local int sent = 0;          // the signal

void reach(const char* function) {
  if (std::strcmp(chosen, function) == 0 && --left == 0) raise(sent);
}

template <typename Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// Counts the calls of this thread from now on, and sends the signal before call number `at`. function: one of those below.
extern "C" void stop_points_arm(const char* function, long at, int signal) {
  left = at;
  sent = signal;
  std::strncpy(chosen, function, sizeof chosen - 1);
}

// Stops counting. Returns whether the signal has been sent since stop_points_arm().
extern "C" int stop_points_disarm() {
  chosen[0] = '\0';
  return left <= 0;
}

extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long locals, const iovec* remote,
                                    unsigned long remotes, unsigned long flags) {
  static const auto real = next(&process_vm_readv, "process_vm_readv");
  reach("process_vm_readv");
  return real(pid, local, locals, remote, remotes, flags);
}

// The core calls futex through this function.
extern "C" long syscall(long number, ...) noexcept {
  static const auto real = next(&syscall, "syscall");
  va_list list;
  va_start(list, number);
  long words[6];
  for (long& word : words) word = va_arg(list, long);
  va_end(list);
  reach("syscall");
  return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

extern "C" void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  static const auto real = next(&mmap, "mmap");
  reach("mmap");
  return real(address, bytes, protection, flags, fd, offset);
}

extern "C" ssize_t recv(int fd, void* data, size_t bytes, int flags) {
  static const auto real = next(&recv, "recv");
  reach("recv");
  return real(fd, data, bytes, flags);
}

extern "C" ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  static const auto real = next(&send, "send");
  reach("send");
  return real(fd, data, bytes, flags);
}

extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  static const auto real = next(&sendmsg, "sendmsg");
  reach("sendmsg");
  return real(fd, message, flags);
}

extern "C" int sched_yield() noexcept {
  static const auto real = next(&sched_yield, "sched_yield");
  reach("sched_yield");
  return real();
}

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static const auto real = next(&clock_gettime, "clock_gettime");
  reach("clock_gettime");
  return real(clock, time);
}
