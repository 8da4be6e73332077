// Creates a file in a tmpfs that belongs to this process and is not mounted anywhere. The file can have huge pages even if memfds
// cannot.
#pragma once

#include <string>

namespace mscomm {

// Opens a nameless, empty file and returns its descriptor, which is close-on-exec. With MADV_HUGEPAGE, mappings of the file get
// huge pages even if shmem_enabled is "never", which denies them to memfds. open_in_own_tmpfs() needs Linux 5.2, and either
// CAP_SYS_ADMIN or permission to create a user namespace. If the file cannot be created, returns -1 and sets `why` to what the
// kernel refused. label: what /proc/self/maps shows as the name of the file.
int open_in_own_tmpfs(const char* label, std::string& why);

}  // namespace mscomm
