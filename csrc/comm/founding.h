// Sets up one rank's part of a group: the arena, the mesh, and the communicator that uses them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "algo/algorithm.h"
#include "backend/host.h"
#include "base/deadline.h"
#include "base/descriptor.h"
#include "comm/communicator.h"
#include "comm/peers.h"
#include "comm/recorder.h"
#include "net/stream.h"

namespace mscomm {

// What is decided about a group before it is founded. name, ranks and epoch are the same on all ranks of the group. control and
// spin are the same on all ranks of the group that share a host. The remaining fields belong to this rank.
struct Founding {
  std::string name;
  std::vector<int> ranks;  // the job rank of each rank of the group
  Layout layout;
  uint32_t epoch = 0;
  uint64_t control = 0;  // the offset of the arena's memory in the heap of the group's lowest job rank on this host
  bool spin = false;
  // If the group has a mesh, one entry for each rank of the group: a socket that is connected to that rank, or -1 for this rank
  // itself and for links that do not exist yet. Founded takes ownership of the sockets.
  std::vector<Descriptor> links{};
  // Empty, or one entry for each link: if it has a secret, the link is encrypted.
  std::vector<std::optional<Secret>> secrets{};
  // An eventfd, or -1. The core writes to it when a started call, a started message or a call on the device has failed, when
  // Communicator::stuck() has a number, when there are notices for the user, and when a call needs a link that does not exist. A
  // Python thread reads the eventfd. So no core thread has to call into Python: such a call might never return while the process
  // is exiting.
  Descriptor news{};
};

// One rank's part of a group.
class Founded {
 public:
  // interrupt: see Communicator::Hooks.
  Founded(Founding founding, const std::shared_ptr<Peers>& peers, std::function<void()> interrupt);

  const HostBackend& host() const { return *host_; }
  const Recorder& recorder() const { return recorder_; }
  Communicator& communicator() const { return *communicator_; }
  // Returns the notices that have not been returned yet.
  std::vector<std::string> notices();
  // The links of collective calls that are set up later, see Mesh. Each peer of add_data_link() calls it, too: it waits for at
  // most handshake_s for the handshake of an encrypted link.
  std::vector<int> wanted_data_links();
  void expect_data_link(int peer);
  void add_data_link(int peer, int fd, const std::optional<Secret>& secret);
  // Sets up the group on a device. Every rank of the group must call this with the same id, which Vendor::make_id has created on
  // one rank. check: see VendorBackend.
  void join_device(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, const std::string& id,
                   const Deadline& deadline, const std::function<void()>& check);

 private:
  Recorder recorder_;
  std::mutex notices_mutex_;  // protects notices_
  std::vector<std::string> notices_;
  HostBackend* host_;
  // This must be the last member. C++ destroys the last member first, and the communicator's threads use the other members.
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace mscomm
