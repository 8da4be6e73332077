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
  // ranks: the group's ranks, as ranks of the job, for errors. links: by rank; all ranks of the group but this one have one.
  // recorded: finds this rank's own call of that number.
  using Recorded = std::function<std::optional<Signature>(uint64_t number)>;
  Mesh(std::vector<int> ranks, int rank, uint32_t epoch, std::vector<std::optional<Stream>> links, Recorded recorded);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }

  // Starts a call, and compares the headers that peers have already sent, without waiting.
  void begin(const Signature& mine);
  // Queues the pieces. They are sent while a later receive or exchange waits. The peers take turns, a part of a piece each, so
  // that one stream at a time has the wire. If the peer whose turn it is does not read, so that the wire is free, data goes to
  // the others as well. The pieces must stay unchanged until the next exchange has ended, or until the peer has sent something
  // that shows that it has them.
  void send(std::span<const Piece> out);
  // Receives all pieces, in any order, at most one from each peer. When it has waited for a while, it tells the peers that have
  // not sent their pieces which call this rank is in.
  void receive(std::span<const Piece> in, const Wait& wait);
  // Sends and receives in full duplex. Returns when everything was received, and everything that was ever queued is sent.
  void exchange(std::span<const Piece> out, std::span<const Piece> in, const Wait& wait);
  // Compares the headers that peers have sent since, without waiting.
  void last_look();
  // Sends as much of what is queued as it can without waiting.
  void progress();
  // Whether everything that was ever queued has been sent.
  bool all_sent() const;
  // The peers that this rank waits for.
  std::vector<int> missing() const;

  // From any thread: ends all links at once, so that both sides stop waiting.
  void shut_down() const;
  // Ends all links. Before that, waits at most timeout_s until the peers' kernels have all that was sent.
  void close(double timeout_s);
  // In a forked child: closes the child's copies of the sockets, so that the peers notice when the parent ends.
  void close_descriptors();

 private:
  struct Queued {
    Piece piece;
    uint64_t turn;
  };
  struct Link {
    std::optional<Stream> stream;
    std::optional<Stream::Broken> ended;  // the link has ended; that is a failure only if we wait for data from this peer

    bool greeted = false;    // the peer was told which call we are in
    bool announced = false;  // ... and that data follows
    std::deque<Header> outbox;
    size_t outbox_sent = 0;    // bytes of outbox.front() that were sent
    std::deque<Queued> queue;  // sent after the outbox; the first piece is what is left of it

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
  // The peer whose piece is sent next; -1: none.
  int next();
  bool send_some(int peer);
  size_t send_piece(Link& link);
  bool receive_some(int peer);
  // Compares a complete inbox with our own calls. False: the peer is in a later call; the header stays for that call.
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
  Clock::time_point looked_;                    // when this call last called look(): it may consist of many short exchanges
  std::deque<std::pair<int, uint64_t>> turns_;  // peers and turns, in order; some of the pieces may have been sent already
  uint64_t last_turn_ = 0;
  Clock::time_point turn_moved_;  // when bytes were last sent to the peer whose turn it is, or queued with nothing before them
  // If the peer whose turn it is accepts no more data now, and pieces for others are queued: whether these wait or are sent, too.
  enum class Others { none, wait, go } others_ = Others::none;
};

}  // namespace mscomm
