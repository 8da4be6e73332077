#pragma once

#include <functional>
#include <memory>
#include <thread>

namespace mscomm {

// Starts a thread. If the operating system refuses the thread, this function throws a MemoryError, as for a failed allocation.
std::unique_ptr<std::thread> start_thread(std::function<void()> function);

}  // namespace mscomm
