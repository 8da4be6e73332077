#include "comm/founding.h"

#include <unistd.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "base/error.h"
#include "net/stream.h"
#include "transport/arena.h"
#include "transport/mesh.h"

namespace mscomm {

namespace {

std::unique_ptr<HostBackend> carriers_of(Founding& founding, const Peers& peers, Mesh::Recorded recorded,
                                         std::function<void()> wants) {
  std::vector<Descriptor>& links = founding.links;
  const std::vector<int>& ranks = founding.ranks;
  const Layout& layout = founding.layout;
  if (ranks.size() != static_cast<size_t>(layout.size) || links.size() != (layout.mesh ? ranks.size() : 0))
    throw Error("ValueError", "group: hosts and links must have one entry for each rank");
  std::vector<std::optional<Secret>>& secrets = founding.secrets;
  if (secrets.empty()) secrets.resize(links.size());
  if (secrets.size() != links.size()) throw Error("ValueError", "group: secrets must have one entry for each link, or be empty");
  std::unique_ptr<Mesh> mesh;
  if (layout.mesh) {
    std::vector<std::optional<Stream>> streams(ranks.size());
    std::vector<Stream*> all;
    for (size_t peer = 0; peer < ranks.size(); peer++)
      if (links[peer].get() >= 0)
        all.push_back(&streams[peer].emplace(links[peer].release(), peers.names.at(ranks[peer]), secrets[peer]));
    shake_hands(all, Deadline(handshake_s));
    mesh = std::make_unique<Mesh>(ranks, layout.rank, founding.epoch, founding.spin, std::move(streams), std::move(recorded),
                                  std::move(wants));
  }
  std::unique_ptr<Arena> arena;
  if (layout.arena) {
    std::vector<int> at_home = renumbered(layout.at_home(), ranks);
    arena = std::make_unique<Arena>(std::move(at_home), layout.place, peers.heaps, founding.control, founding.spin);
  }
  return std::make_unique<HostBackend>(std::move(founding.layout), std::move(arena), std::move(mesh));
}

}  // namespace

Founded::Founded(Founding founding, const std::shared_ptr<Peers>& peers, std::function<void()> interrupt) {
  const int rank = founding.layout.rank;
  const auto wake = [news = std::make_shared<Descriptor>(std::move(founding.news))] {
    const uint64_t one = 1;
    // EAGAIN means that the eventfd's counter is full. The reader has not read the counter yet, but will do so.
    if (news->get() >= 0 && write(news->get(), &one, sizeof one) < 0 && errno != EAGAIN) return;
  };
  auto backend = carriers_of(founding, *peers, [this](uint64_t number) { return recorder_.find(number); }, wake);
  host_ = backend.get();
  const auto notice = [this, wake](const std::string& text) {
    {
      const std::lock_guard lock(notices_mutex_);
      notices_.push_back(text);
    }
    wake();
  };
  communicator_ = std::make_unique<Communicator>(std::move(founding.name), std::move(founding.ranks), rank, peers,
                                                 std::move(backend), founding.epoch, founding.spin, recorder_,
                                                 Communicator::Hooks{std::move(interrupt), notice, wake});
}

std::vector<std::string> Founded::notices() {
  const std::lock_guard lock(notices_mutex_);
  return std::exchange(notices_, {});
}

std::vector<int> Founded::wanted_data_links() { return host_->mesh() ? host_->mesh()->wanted() : std::vector<int>{}; }

void Founded::expect_data_link(int peer) {
  if (host_->mesh()) host_->mesh()->expect(peer);
}

void Founded::add_data_link(int peer, int fd, const std::optional<Secret>& secret) {
  Stream stream(fd, communicator_->name_of(peer), secret);
  Stream* const one = &stream;
  shake_hands({&one, 1}, Deadline(handshake_s));
  if (host_->mesh()) host_->mesh()->add(peer, std::move(stream));
}

void Founded::join_device(std::shared_ptr<Vendor> vendor, std::shared_ptr<Runtime> runtime, int device, const std::string& id,
                          const Deadline& deadline, const std::function<void()>& check) {
  communicator_->add_device(std::make_unique<VendorBackend>(std::move(vendor), std::move(runtime), device, id,
                                                            communicator_->size(), communicator_->rank(), deadline, check));
}

}  // namespace mscomm
