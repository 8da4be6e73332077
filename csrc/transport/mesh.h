// The mesh: a link to every other rank of the group, and the exchange of a call's bytes over them by the caller's own thread.
//
// A call opens each link that it uses with its header; data counts only after the header was compared with this rank's own call.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "net/frame.h"
#include "net/stream.h"
#include "net/wait.h"

namespace mscomm {

// One direction of one link within an exchange.
struct Piece {
  int peer;
  char* data;  // sent from, or received to
  size_t bytes;
};

class Mesh {
 public:
  // ranks: of the group, as ranks of the job, for errors; links[rank] for every rank of the group but this one; own calls are
  // looked up by number with `recorded`.
  using Recorded = std::function<std::optional<Signature>(uint64_t number)>;
  Mesh(std::vector<int> ranks, int rank, uint32_t epoch, std::vector<std::optional<Stream>> links, Recorded recorded);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }

  // Starts a call; takes in what peers already said, without waiting.
  void begin(const Signature& mine);
  // Queues the pieces. They go while a later receive or exchange waits. The peers take turns, a part of a piece each, so that one
  // stream at a time has the wire. While the peer whose turn it is leaves the wire free because it does not read, the others are
  // sent to as well. The pieces must stay unchanged until the next exchange has ended, or the peer has shown by what it sent that
  // it has them.
  void send(std::span<const Piece> out);
  // Receives all pieces, in any order, at most one from a peer. Who waits long tells the peer which call it is in.
  void receive(std::span<const Piece> in, const Wait& wait);
  // Both, full duplex; returns when all that was ever queued is sent, too.
  void exchange(std::span<const Piece> out, std::span<const Piece> in, const Wait& wait);
  // Takes in what peers said since, without waiting.
  void last_look();
  // Sends what goes at once.
  void progress();
  // Whether all that was ever queued has gone.
  bool all_sent() const;
  // Pieces still to come, for "who is missing".
  std::vector<int> missing() const;

  // From any thread: ends all links at once, so that both sides stop waiting.
  void shut_down() const;
  // Ends all links after what was sent has reached the other side's kernel, for at most timeout_s.
  void close(double timeout_s);
  // In a forked child: closes the child's copies of the sockets, so that the peers see the parent's end when it ends.
  void close_descriptors();

 private:
  struct Queued {
    Piece piece;
    uint64_t turn;
  };
  struct Link {
    std::optional<Stream> stream;
    std::optional<Stream::Broken> ended;  // seen while nothing was due from this peer: no failure until something is

    bool greeted = false;    // the peer was told which call we are in
    bool announced = false;  // ... and that data follows
    std::deque<Header> outbox;
    size_t outbox_sent = 0;    // bytes of outbox.front() that are gone
    std::deque<Queued> queue;  // behind the outbox; of the first what is still to go

    Header inbox;
    size_t inbox_got = 0;  // bytes of inbox that came
    bool due = false;      // the peer's header for the current call was compared and announced data
    bool receiving = false;
    char* receive_at = nullptr;
    size_t receive_left = 0;

    bool sent() const { return outbox.empty() && queue.empty(); }
    bool received() const { return !receiving || (due && receive_left == 0); }
    bool listens() const { return stream && !ended && inbox_got < sizeof(Header) && (!due || receive_left > 0); }
  };

  template <typename Done>
  void transfer(std::span<const Piece> in, const Wait& wait, const Done& done);
  void greet(Link& link, bool payload);
  // Whose piece goes next; -1: there is none.
  int next();
  bool send_some(int peer);
  size_t send_piece(Link& link);
  bool receive_some(int peer);
  // Compares a complete inbox with our own calls. False: the peer is ahead, keep it for later.
  bool compare_inbox(int peer);
  bool move_some();
  size_t send_in_turn();
  bool others_wait(int holder) const;
  void poll_links(const Wait& wait);
  void look(const Wait& wait);
  bool all_received() const;
  Error lost(int peer, const Stream::Broken& broken) const;

  std::vector<int> ranks_;
  int rank_;
  uint32_t epoch_;
  std::vector<Link> links_;
  Recorded recorded_;
  Signature mine_;
  Clock::time_point looked_;                    // when this call looked around last: many short exchanges may make a long call
  std::deque<std::pair<int, uint64_t>> turns_;  // peers and turns; those whose piece has gone may still be there
  uint64_t last_turn_ = 0;
  Clock::time_point turn_moved_;  // when bytes of the piece whose turn it is went last, or there was none before
  // The peer whose turn it is takes no more now, and others have something queued: whether that goes at the same time.
  enum class Others { none, wait, go } others_ = Others::none;
};

}  // namespace mscomm
