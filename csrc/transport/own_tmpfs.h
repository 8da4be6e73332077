// A file in a tmpfs of this process's own, which is mounted nowhere: huge pages for who asks, where memfds have none.
#pragma once

#include <string>

namespace mscomm {

// An open, nameless, empty file, close-on-exec: its mappings get huge pages by MADV_HUGEPAGE, also where shmem_enabled
// is "never" for memfds. Needs Linux 5.2, and CAP_SYS_ADMIN or the right to make a user namespace. -1: not here;
// then `why` says what the kernel refused. label: what /proc/self/maps calls it.
int open_in_own_tmpfs(const char* label, std::string& why);

}  // namespace mscomm
