#include "backend/shared_group.h"

#include <thread>
#include <vector>

#include "base/deadline.h"

namespace mscomm {

namespace {

using namespace std::chrono_literals;

// The longest time that an abort waits for another thread to leave the library.
constexpr auto call_takes_at_most = 1s;

// Keeps a group until the process ends, because it cannot be freed earlier.
void leave_behind(std::unique_ptr<VendorGroup> group) {
  static std::mutex mutex;  // protects `left`
  static auto& left = *new std::vector<std::unique_ptr<VendorGroup>>;
  const std::lock_guard lock(mutex);
  left.push_back(std::move(group));
}

}  // namespace

void SharedGroup::look() {
  if (const std::unique_lock calling(calling_, std::try_to_lock); calling && group_ && !aborted_) (void)group_->busy();
}

void SharedGroup::abort() {
  std::unique_ptr<VendorGroup> group;
  {
    // Usually, another thread stays inside the library only for microseconds. If it is still there after call_takes_at_most, the
    // library hangs, and only aborting the group makes that thread return.
    std::unique_lock calling(calling_, call_takes_at_most);
    if (!calling) {
      aborted_ = true;
      if (group_) group_->abort(true);
      return;
    }
    group = std::move(group_);
  }
  if (group) group->abort(false);
}

void SharedGroup::finish(bool captured) {
  std::unique_ptr<VendorGroup> group;
  {
    const std::lock_guard calling(calling_);
    group = std::move(group_);
  }
  if (!group) return;
  // Do not free a captured group, because that would block until the graph that contains the group's calls is destroyed.
  if (captured) return leave_behind(std::move(group));
  try {
    group->finish();
    const Deadline deadline(frees_within_s);
    while (group->busy() && !deadline.passed()) std::this_thread::sleep_for(1ms);
    if (deadline.passed()) group->abort(false);
  } catch (const Error&) {
    group->abort(false);  // another rank has failed; that rank's calls and the hub report the failure
  }
}

}  // namespace mscomm
