// Puts texts into the launcher's PMIx store, and gets texts from it. The helper acts as the rank that the environment variables
// name.
//
//     pmix_helper SOCKET TIMEOUT_S LIBRARY...
//
// The lines on stdin say what to do. They are not in argv, because argv is public, and a text may hold a secret:
//
//     put KEY TEXT         puts the text into the store
//     get FIRST END KEY    waits for the texts of the ranks FIRST to END - 1, and writes each to stdout, as a line
//     end                  ends the helper. The end of stdin does so, too, but a child that another thread of the user's process
//                          has just forked may hold stdin open
//
// If a rank has put no text TIMEOUT_S after the start of the helper, its line is empty, and the later ranks have no line.
// If rank 0 gets texts and then puts some, it needs one helper for both: when a helper
// exits, some servers forget the gets of other ranks on this host that wait for this rank.
//
// SOCKET is the number of a Unix socket, to which the helper sends the socket of its connection to the server.
//
// The helper is a separate process, because PMIx_Init and PMIx_Finalize in the user's process would break an earlier or later
// MPI_Init in that process. The helper needs no fence, because a get waits in the server until the rank has committed its text.
// So a rank waits only for the ranks whose texts it gets. The ABI below is that of PMIx 3 to 6.
//
// The user's process keeps the connection open after PMIx_Finalize. This avoids a race in the servers of PMIx 4.0 to 6.0: one
// thread answers PMIx_Finalize, and another thread records later that the client has finalized. If the client closes its
// connection between these two steps, the server considers the client dead. Every later fence, such as the one in MPI_Init, then
// waits for one rank too few, and the job hangs or crashes. The user's process may close the connection once the server has
// answered the same rank's next PMIx_Init or PMIx_Finalize, which MPI or the next helper calls. By that time, the server has
// recorded that this client has finalized.
//
// The exit status is 0 for success, and 1 for an error, with a line on stderr.

#include <dlfcn.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
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

constexpr int TEXT_MAX = 1023;

// Types, scopes, statuses and layouts from pmix_common.h. They have not changed since PMIx 3.
constexpr uint16_t PMIX_STRING = 3, PMIX_INT = 6;
constexpr uint8_t PMIX_GLOBAL = 3;
constexpr int PMIX_ERR_TIMEOUT = -24, PMIX_ERR_NOT_FOUND = -46;

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

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

[[noreturn]] void fail(const char* what, const char* why) {
  fprintf(stderr, "%s: %s\n", what, why);
  _exit(1);
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

int put(const Pmix& pmix, const char* key, char* text) {
  Value value{PMIX_STRING, {text}};
  return pmix.put(PMIX_GLOBAL, key, &value);
}

int get(const Pmix& pmix, Process process, unsigned rank, const char* key, Time deadline, FILE* answers) {
  process.rank = rank;
  const auto left = std::chrono::ceil<std::chrono::seconds>(deadline - Clock::now()).count();
  Info timeout{"pmix.timeout", 0, {PMIX_INT, {}}};
  timeout.value.integer = std::max(1, int(left));
  Value* value = nullptr;
  int status = pmix.get(&process, key, &timeout, 1, &value);
  if (status && Clock::now() >= deadline) status = PMIX_ERR_TIMEOUT;  // for a rank on another host, it is another error
  if (!status && (!value || value->type != PMIX_STRING || !value->string)) return PMIX_ERR_NOT_FOUND;
  if (!status || status == PMIX_ERR_TIMEOUT) fprintf(answers, "%.*s\n", TEXT_MAX, status ? "" : value->string);
  fflush(answers);
  return status;
}

// Runs the commands on stdin until one fails, and returns its status, or 0. `what` is then the name of the last PMIx function.
int run_commands(const Pmix& pmix, const Process& me, Time deadline, FILE* answers, const char*& what) {
  char line[2 * TEXT_MAX], key[64], text[TEXT_MAX + 1];
  unsigned first = 0, end = 0;
  bool committed = true;
  while (fgets(line, sizeof line, stdin) && strcmp(line, "end\n") != 0) {
    int status = 0;
    if (sscanf(line, "put %63s %1023s", key, text) == 2) {
      what = "PMIx_Put";
      status = put(pmix, key, text);
      committed = false;
    } else if (sscanf(line, "get %u %u %63s", &first, &end, key) == 3) {
      what = "PMIx_Commit";
      if (!committed) status = pmix.commit();
      committed = true;
      if (!status) what = "PMIx_Get";
      for (unsigned rank = first; rank < end && !status; ++rank) status = get(pmix, me, rank, key, deadline, answers);
      if (status == PMIX_ERR_TIMEOUT) status = 0;
    }
    if (status) return status;
  }
  what = "PMIx_Commit";
  return committed ? 0 : pmix.commit();
}

void hand_over_connection(int receiver) {
  char byte = 0;
  iovec content{&byte, 1};
  alignas(cmsghdr) char rights[CMSG_SPACE(sizeof connection)] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = rights;
  message.msg_controllen = sizeof rights;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof connection);
  memcpy(CMSG_DATA(header), &connection, sizeof connection);
  if (sendmsg(receiver, &message, 0) < 0) fail("the socket for the connection", strerror(errno));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) fail("usage", "pmix_helper SOCKET TIMEOUT_S LIBRARY...");
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // do not outlive the rank
  const Time deadline = Clock::now() + std::chrono::seconds(atoi(argv[2]));
  FILE* const answers = fdopen(dup(STDOUT_FILENO), "w");
  dup2(STDERR_FILENO, STDOUT_FILENO);  // what libraries print to stdout goes to stderr
  const Pmix pmix = open_first(argv + 3);
  Process me{};
  if (const int status = pmix.init(&me, nullptr, 0)) fail("PMIx_Init", pmix.error_string(status));
  const char* what = "";
  const int status = run_commands(pmix, me, deadline, answers, what);
  pmix.finalize(nullptr, 0);  // without this, the launcher reports the job as failed
  if (connection >= 0) hand_over_connection(atoi(argv[1]));
  if (status) fail(what, pmix.error_string(status));
  _exit(0);  // skips libpmix's exit handlers, which have nothing left to do
}
