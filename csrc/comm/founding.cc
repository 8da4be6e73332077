#include "comm/founding.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "net/stream.h"
#include "transport/arena.h"

namespace mscomm {

std::unique_ptr<HostBackend> found(Founding founding, const Peers& peers, Mesh::Recorded recorded) {
  std::vector<Descriptor>& links = founding.links;
  const std::vector<int>& ranks = founding.ranks;
  const int rank = founding.layout.rank;
  if (ranks.size() != founding.layout.host.size() || (!links.empty() && links.size() != ranks.size()))
    throw Error("ValueError", "group: hosts and links must have one entry for each rank");
  std::unique_ptr<Mesh> mesh;
  if (!links.empty()) {
    std::vector<std::optional<Stream>> streams(ranks.size());
    for (size_t peer = 0; peer < ranks.size(); peer++)
      if (links[peer].get() >= 0) streams[peer].emplace(links[peer].release(), peers.names.at(ranks[peer]));
    mesh = std::make_unique<Mesh>(ranks, rank, founding.epoch, std::move(streams), std::move(recorded));
  }
  std::unique_ptr<Arena> arena;
  if (std::vector<int>& at_home = founding.at_home; !at_home.empty()) {
    const auto place = std::find(at_home.begin(), at_home.end(), ranks.at(rank)) - at_home.begin();
    if (static_cast<size_t>(place) == at_home.size()) throw Error("ValueError", "group: at_home lacks this rank");
    arena = std::make_unique<Arena>(std::move(at_home), static_cast<int>(place), peers.heaps, founding.control, founding.spin);
  }
  return std::make_unique<HostBackend>(std::move(founding.layout), founding.forced, std::move(arena), std::move(mesh));
}

}  // namespace mscomm
