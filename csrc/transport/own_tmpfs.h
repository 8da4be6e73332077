// A file in a tmpfs of this process's own, which is mounted nowhere. It can have huge pages where memfds have none.
#pragma once

#include <string>

namespace mscomm {

// Opens a nameless, empty file, close-on-exec. Its mappings get huge pages by MADV_HUGEPAGE, even if shmem_enabled is "never" for
// memfds. Needs Linux 5.2, and CAP_SYS_ADMIN or the right to make a user namespace. Returns -1 if it cannot; then `why` says what
// the kernel refused. label: what /proc/self/maps calls the file.
int open_in_own_tmpfs(const char* label, std::string& why);

}  // namespace mscomm
