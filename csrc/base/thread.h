// Starts the core's own threads: a group's worker, a mailbox's own thread, and the watcher of a device.
#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace mscomm {

// Throws a MemoryError if the operating system cannot start the thread.
std::unique_ptr<std::thread> start_thread(std::function<void()> function);

}  // namespace mscomm
