// Puts one string into the launcher's PMIx store, or gets one string from the store, and exits. The helper acts as the rank that
// the environment variables name.
//
//     pmix_helper put KEY TIMEOUT_S LIBRARY...   reads the value from stdin, because it may hold a secret, and argv is public
//     pmix_helper get KEY TIMEOUT_S LIBRARY...   waits for rank 0's value
//
// The answer is one message on stdout, which must be a Unix socket. The message carries the socket of the connection
// to the server. For get, it also carries the value.
//
// The helper is a separate process, because PMIx_Init and PMIx_Finalize in the user's process would break an earlier or later
// MPI_Init in that process. The helper needs no fence, because a get waits in the server until rank 0 has committed. So a rank
// waits only for rank 0. The ABI below is that of PMIx 3 to 6.
//
// The user's process keeps the connection open after PMIx_Finalize. This avoids a race in the servers of PMIx 4.0 to 6.0: one
// thread answers PMIx_Finalize, and another thread records later that the client has finalized. If the client closes its
// connection between these two steps, the server considers the client dead. Every later fence, such as the one in MPI_Init, then
// waits for one rank too few, and the job hangs or crashes. The user's process may close the connection once the server has
// answered the same rank's next PMIx_Init or PMIx_Finalize, which MPI or the next helper calls. By that time, the server has
// recorded that this client has finalized.
//
// The exit status is 0 for success, 1 for an error (with a line on stderr), and TIMED_OUT if rank 0 did not put a value in time.

#include <dlfcn.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

int connection = -1;  // after PMIx_Finalize, a copy of the connection to the server

}  // namespace

// libpmix ends its connection by calling shutdown() and close(). The dynamic linker finds the shutdown() in this file before the
// shutdown() in libc. The shutdown() in this file keeps a copy of the socket and shuts nothing down, so the connection stays
// open.
extern "C" __attribute__((visibility("default"))) int shutdown(int socket, int) noexcept {
  if (connection >= 0) close(connection);
  connection = dup(socket);
  return 0;
}

namespace {

constexpr int TIMED_OUT = 75;  // the value of EX_TEMPFAIL in sysexits.h
constexpr size_t VALUE_MAX = 1023;

// Types, scopes, statuses and layouts from pmix_common.h. They have not changed since PMIx 3.
constexpr uint16_t PMIX_STRING = 3, PMIX_INT = 6;
constexpr uint8_t PMIX_GLOBAL = 3;
constexpr int PMIX_ERR_TIMEOUT = -24, PMIX_ERR_NOT_FOUND = -46;

struct Process {
  char nspace[256];
  uint32_t rank;
};

struct Value {
  uint16_t type;
  union {
    char* string;
    int integer;
    char space[24];
  };
};

struct Info {
  char key[512];
  uint32_t flags;
  Value value;
};

static_assert(sizeof(Process) == 260 && sizeof(Value) == 32 && sizeof(Info) == 552);

struct Pmix {
  int (*init)(Process*, Info*, size_t);
  int (*put)(uint8_t, const char*, Value*);
  int (*commit)();
  int (*get)(const Process*, const char*, const Info*, size_t, Value**);
  int (*finalize)(const Info*, size_t);
  const char* (*error_string)(int);
};

[[noreturn]] void fail(const char* what, const char* why, int status = 1) {
  fprintf(stderr, "%s: %s\n", what, why);
  _exit(status);
}

template <class Function>
void bind(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) fail("dlsym", dlerror());
}

Pmix open_first(char** libraries) {
  void* library = nullptr;
  for (char** path = libraries; *path && !library; ++path) {
    library = dlopen(*path, RTLD_NOW | RTLD_GLOBAL);  // RTLD_GLOBAL, because libpmix's plug-ins need libpmix's symbols
    if (!library) fprintf(stderr, "%s\n", dlerror());
  }
  if (!library) fail("libpmix", "none of these could be opened");
  Pmix pmix;
  bind(library, "PMIx_Init", pmix.init);
  bind(library, "PMIx_Put", pmix.put);
  bind(library, "PMIx_Commit", pmix.commit);
  bind(library, "PMIx_Get", pmix.get);
  bind(library, "PMIx_Finalize", pmix.finalize);
  bind(library, "PMIx_Error_string", pmix.error_string);
  return pmix;
}

int put(const Pmix& pmix, const char* key) {
  char text[VALUE_MAX + 1] = {};
  size_t length = 0;
  for (ssize_t n; length < VALUE_MAX && (n = read(STDIN_FILENO, text + length, VALUE_MAX - length)) > 0;) length += n;
  Value value{PMIX_STRING, {text}};
  const int status = pmix.put(PMIX_GLOBAL, key, &value);
  return status ? status : pmix.commit();
}

int get(const Pmix& pmix, const Process& me, const char* key, int timeout_s, char* text) {
  Process rank0 = me;
  rank0.rank = 0;
  Info timeout{"pmix.timeout", 0, {PMIX_INT, {}}};
  timeout.value.integer = timeout_s;
  Value* value = nullptr;
  if (const int status = pmix.get(&rank0, key, &timeout, 1, &value)) return status;
  if (!value || value->type != PMIX_STRING || !value->string) return PMIX_ERR_NOT_FOUND;
  strncpy(text, value->string, VALUE_MAX);
  return 0;
}

void answer(int answers, char* text) {
  // Send the terminating zero as well. Without it, the reader could not tell an empty message from the end of the connection.
  iovec line{text, strlen(text) + 1};
  alignas(cmsghdr) char rights[CMSG_SPACE(sizeof connection)] = {};
  msghdr message{};
  message.msg_iov = &line;
  message.msg_iovlen = 1;
  if (connection >= 0) {
    message.msg_control = rights;
    message.msg_controllen = sizeof rights;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof connection);
    memcpy(CMSG_DATA(header), &connection, sizeof connection);
  }
  if (sendmsg(answers, &message, 0) < 0) fail("the answer to stdout", strerror(errno));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) fail("usage", "pmix_helper put|get KEY TIMEOUT_S LIBRARY...");
  prctl(PR_SET_PDEATHSIG, SIGKILL);        // do not outlive the rank
  const int answers = dup(STDOUT_FILENO);  // the answer goes there; what libraries print to stdout goes to stderr
  dup2(STDERR_FILENO, STDOUT_FILENO);
  const bool puts = strcmp(argv[1], "put") == 0;
  const Pmix pmix = open_first(argv + 4);
  Process me{};
  if (const int status = pmix.init(&me, nullptr, 0)) fail("PMIx_Init", pmix.error_string(status));
  char text[VALUE_MAX + 1] = {};
  const int status = puts ? put(pmix, argv[2]) : get(pmix, me, argv[2], atoi(argv[3]), text);
  pmix.finalize(nullptr, 0);  // without this, the launcher reports the job as failed
  answer(answers, text);
  if (status == PMIX_ERR_TIMEOUT) fail("PMIx_Get", "rank 0 has published nothing", TIMED_OUT);
  if (status) fail(puts ? "PMIx_Put" : "PMIx_Get", pmix.error_string(status));
  _exit(0);  // skips libpmix's exit handlers, which have nothing left to do
}
