#include "transport/own_tmpfs.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>

#include "base/descriptor.h"
#include "base/fence.h"

namespace mscomm {

namespace {

// These numbers are from linux/mount.h and the system call table of kernel 5.2, and are the same on all architectures. They are
// repeated here because the build machine's headers may be older.
constexpr long sys_fsopen = 430, sys_fsconfig = 431, sys_fsmount = 432;
constexpr int fsopen_cloexec = 1, fsmount_cloexec = 1;
constexpr int set_string = 1, create = 6;
constexpr int nosuid_nodev_noexec = 2 | 4 | 8;

// ThreadSanitizer assumes that a child process has its own copy of our memory. So in a build with ThreadSanitizer, the child must
// not share our memory.
constexpr bool may_share_memory_with_a_child = !thread_sanitizer;

// The input and the result of make_file(). If the kernel does not let this process create a tmpfs, a child process calls
// make_file(). The child shares our memory and our descriptors, but it must not allocate memory or throw.
struct Task {
  const char* label;
  std::array<char, 32> users{}, groups{};  // id mappings: "0 1000 1" maps root in the namespace to user 1000 outside
  int fd = -1;
  const char* failed = nullptr;  // the first step that failed
  int error = 0;

  // Returns whether the step `what` has succeeded. Records the first step that fails.
  bool ok(long result, const char* what) {
    if (result >= 0) return true;
    if (!failed) failed = what, error = errno;
    return false;
  }
};

void make_file(Task& task) {
  const Descriptor tmpfs(static_cast<int>(syscall(sys_fsopen, "tmpfs", fsopen_cloexec)));
  const int fd = tmpfs.get();
  if (!task.ok(fd, "fsopen of a tmpfs") ||
      !task.ok(syscall(sys_fsconfig, fd, set_string, "huge", "advise", 0), "a tmpfs with huge=advise") ||
      !task.ok(syscall(sys_fsconfig, fd, set_string, "size", "0", 0), "a tmpfs without a limit") ||
      !task.ok(syscall(sys_fsconfig, fd, set_string, "mode", "0700", 0), "a tmpfs with mode=0700") ||
      !task.ok(syscall(sys_fsconfig, fd, create, nullptr, nullptr, 0), "making a tmpfs"))
    return;
  const Descriptor mount(static_cast<int>(syscall(sys_fsmount, fd, fsmount_cloexec, nosuid_nodev_noexec)));
  if (!task.ok(mount.get(), "fsmount of a tmpfs")) return;
  task.fd = openat(mount.get(), task.label, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (task.ok(task.fd, "a file in a tmpfs")) unlinkat(mount.get(), task.label, 0);
}

bool write_file(const char* path, const char* text) {
  const Descriptor file(open(path, O_WRONLY | O_CLOEXEC));
  return file.get() >= 0 && write(file.get(), text, std::strlen(text)) >= 0;
}

// The child's main function. Makes the child root in its user namespace, and creates the file. See "Defining user and group ID
// mappings" in user_namespaces(7).
int in_namespace(void* argument) {
  Task& task = *static_cast<Task*>(argument);
  if (task.ok(write_file("/proc/self/uid_map", task.users.data()) ? 0 : -1, "uid_map of a user namespace") &&
      task.ok(write_file("/proc/self/setgroups", "deny") ? 0 : -1, "setgroups of a user namespace") &&
      task.ok(write_file("/proc/self/gid_map", task.groups.data()) ? 0 : -1, "gid_map of a user namespace"))
    make_file(task);
  return 0;
}

// Creates the file in a short-lived child, because only a single-threaded process can enter a user namespace. The child shares
// our memory and our descriptor table. No fork handler runs, no page table is copied, and no SIGCHLD is sent.
void make_file_in_namespace(Task& task) {
  std::snprintf(task.users.data(), task.users.size(), "0 %u 1", geteuid());
  std::snprintf(task.groups.data(), task.groups.size(), "0 %u 1", getegid());
  constexpr size_t stack_bytes = 64 << 10;
  const std::unique_ptr<char[]> stack(new char[stack_bytes]);  // the child's; the calling thread's stack may be smaller than this
  const auto top = reinterpret_cast<uintptr_t>(stack.get() + stack_bytes) / 16 * 16;  // it grows down
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // otherwise a signal handler could run in the child
  const pid_t child = clone(in_namespace, reinterpret_cast<void*>(top),
                            CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_NEWUSER | CLONE_NEWNS, &task);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);  // does not change errno
  if (task.ok(child, "a user namespace"))
    while (waitpid(child, nullptr, __WALL) < 0 && errno == EINTR) {
    }
}

}  // namespace

int open_in_own_tmpfs(const char* label, std::string& why) {
  Task task{.label = label};
  make_file(task);
  if (task.error == EPERM && may_share_memory_with_a_child) {
    task = {.label = label};
    make_file_in_namespace(task);
  }
  if (task.fd < 0) why = std::string(task.failed ? task.failed : "no answer from the child") + ": " + std::strerror(task.error);
  return task.fd;
}

}  // namespace mscomm
