#include "transport/mesh.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <string>

namespace mscomm {

namespace {
// At most this many bytes are moved over one link in one direction before the other direction and the other links are served.
constexpr size_t at_once_bytes = 256 << 10;
// At most this many bytes are sent to a peer in its turn. Then it is the next peer's turn.
constexpr size_t turn_bytes = 128 << 10;
// If only one peer has data queued, longer turns take less time (measured, see docs/design/0005-hosts.md).
constexpr size_t lone_turn_bytes = 1 << 20;
// Data for other peers may be waiting for the end of a peer's turn. In that case, this rank checks at this interval whether the
// peer has stopped reading.
constexpr int look_at_wire_ms = 5;
// A header and a piece of at most this many bytes are received together, and the piece is then copied to its place. This takes
// less time than a second system call.
constexpr size_t together_bytes = 16 << 10;
// How often a rank that makes short calls reads the headers of peers from which it needs no data. These headers arrive only if
// the ranks have made different calls. A barrier always reads them. So a difference in a call before one barrier is noticed in
// the next barrier at the latest, if the link existed before that call.
constexpr double look_at_all_s = 5e-3;
}  // namespace

Mesh::Mesh(std::vector<int> ranks, int rank, uint32_t epoch, bool spin, std::vector<std::optional<Stream>> links,
           Recorded recorded, std::function<void()> wants)
    : ranks_(std::move(ranks)),
      rank_(rank),
      epoch_(epoch),
      spin_(spin),
      links_(links.size()),
      recorded_(std::move(recorded)),
      arrivals_(sizeof(Header) + together_bytes),
      wants_(std::move(wants)),
      expected_(links.size()) {
  for (size_t peer = 0; peer < links.size(); peer++)
    if (links[peer]) links_[peer].stream.emplace(std::move(*links[peer]));
}

void Mesh::begin(const Signature& mine, std::span<const uint64_t> sends, std::span<const uint64_t> expects) {
  mine_ = mine;
  sends_.assign(sends.begin(), sends.end());
  expects_.assign(expects.begin(), expects.end());
  looked_ = Clock::now();
  others_ = Others::none;
  take_new_links();
  for (int peer = 0; peer < size(); peer++) {
    Link& link = links_[peer];
    link.greeted = link.announced = link.due = link.receiving = false;
    link.receive_left = 0;
    use_early(peer);
  }
  const bool due = std::chrono::duration<double>(looked_ - looked_at_all_).count() > look_at_all_s;
  if (due || mine.what == Collective::barrier) last_look();
}

void Mesh::last_look() {
  looked_at_all_ = Clock::now();
  take_new_links();
  for (int peer = 0; peer < size(); peer++)
    while (links_[peer].stream && !links_[peer].due && receive_some(peer)) {
    }
}

void Mesh::progress() {
  while (move_some()) {
  }
}

void Mesh::send(std::span<const Piece> out) {
  if (next() < 0) turn_moved_ = Clock::now();
  size_t longest = 0;
  for (const Piece& piece : out) {
    Link& link = links_[piece.peer];
    if (!link.announced) greet(piece.peer, true);
    longest = std::max(longest, piece.bytes);
  }
  need(out);
  const auto waits = [&](const Link& link) { return &link != &links_[out[0].peer] && !link.queue.empty(); };
  const bool alone = out.size() == 1 && std::ranges::none_of(links_, waits);
  const size_t most = alone ? lone_turn_bytes : turn_bytes;
  for (size_t at = 0; at < longest; at += most)
    for (const Piece& piece : out) {
      if (at >= piece.bytes) continue;
      turns_.emplace_back(piece.peer, ++last_turn_);
      const size_t bytes = std::min(most, piece.bytes - at);
      links_[piece.peer].queue.push_back({{piece.peer, piece.data + at, bytes}, last_turn_});
    }
}

int Mesh::next() {
  for (; !turns_.empty(); turns_.pop_front()) {
    const auto [peer, turn] = turns_.front();
    const auto& queue = links_[peer].queue;
    if (!queue.empty() && queue.front().turn <= turn) return peer;
  }
  return -1;
}

void Mesh::exchange(std::span<const Piece> out, std::span<const Piece> in, const Wait& wait) {
  send(out);
  transfer(in, wait, UINT64_MAX);
}

void Mesh::transfer(std::span<const Piece> in, const Wait& wait, uint64_t turn) {
  for (const Piece& piece : in) {
    Link& link = links_[piece.peer];
    link.receiving = true;
    link.receive_at = piece.data;
    link.receive_left = piece.bytes;
    use_early(piece.peer);
  }
  need(in);
  while (!all_received() || !sent_up_to(turn)) {
    // Call look() regularly even while bytes move. Call look() before move_some(), so that look() cannot throw after this
    // transfer has completed.
    if (seconds_since(looked_) > longest_sleep_ms * 1e-3 || wait.watch.broken()) look(wait);
    if (!move_some()) poll_links(wait);
  }
  for (Link& link : links_) link.receiving = false;
}

void Mesh::greet(int peer, bool payload) {
  Link& link = links_[peer];
  link.outbox.push_back({.payload = payload,
                         .epoch = epoch_,
                         .source = static_cast<uint32_t>(rank_),
                         .signature = mine_,
                         .sends = sends_.empty() ? 0 : sends_[peer],
                         .expects = expects_.empty() ? 0 : expects_[peer]});
  link.greeted = true;
  link.announced |= payload;
}

bool Mesh::sent_up_to(uint64_t turn) const {
  if (turn == UINT64_MAX) return all_sent();
  return std::ranges::all_of(links_, [turn](const Link& link) { return link.queue.empty() || link.queue.front().turn > turn; });
}

bool Mesh::all_sent() const { return std::ranges::all_of(links_, &Link::sent); }

bool Mesh::all_received() const { return std::ranges::all_of(links_, &Link::received); }

bool Mesh::move_some() {
  moved_ = false;
  send_in_turn();
  const int holder = next();
  for (int peer = 0; peer < size(); peer++) {
    Link& link = links_[peer];
    const bool goes = others_ == Others::go && peer != holder && !link.queue.empty();
    if (goes || !link.outbox.empty()) send_some(peer, goes);
  }
  for (int peer = 0; peer < size(); peer++) {
    Link& link = links_[peer];
    if (link.stream && !link.received()) {
      moved_ |= receive_some(peer);
      if (link.ended && !link.received()) throw lost(peer, *link.ended);
    }
    // A peer that died mid-call often leaves its last bytes for us to read. So a link that takes no bytes is a failure only when
    // it has no bytes to read.
    if (link.unsent && !(link.stream && !link.received() && moved_)) throw lost(peer, *link.unsent);
  }
  return moved_;
}

// Sends queued pieces in the order of their turns, and sets others_. Returns how many bytes it sent.
size_t Mesh::send_in_turn() {
  size_t bytes = 0;
  others_ = Others::none;
  for (int peer = next(); peer >= 0 && bytes < at_once_bytes; peer = next()) {
    Link& link = links_[peer];
    const size_t pieces = link.queue.size(), gone = send_some(peer, true);
    bytes += gone;
    if (gone > 0) turn_moved_ = Clock::now();
    if (link.queue.size() < pieces) continue;
    const auto waits = [&](const Link& other) { return &other != &link && !other.queue.empty(); };
    if (std::ranges::any_of(links_, waits)) {
      const bool stalls = !link.stream || seconds_since(turn_moved_) > longest_sleep_ms * 1e-3;
      others_ = stalls || link.stream->waits_for_reader() ? Others::go : Others::wait;
    }
    break;
  }
  return bytes;
}

size_t Mesh::send_some(int peer, bool with_piece) {
  Link& link = links_[peer];
  if (!link.stream || link.unsent) return 0;
  std::array<iovec, 4> parts;
  size_t count = 0, headers = 0;
  for (const Header& header : link.outbox) {
    if (count == parts.size() - 1) break;
    const size_t sent = count == 0 ? link.outbox_sent : 0;
    parts[count++] = {reinterpret_cast<char*>(const_cast<Header*>(&header)) + sent, sizeof header - sent};
    headers += sizeof header - sent;
  }
  const bool piece = (with_piece || link.together) && count == link.outbox.size() && !link.queue.empty();
  if (piece) parts[count++] = {link.queue.front().piece.data, link.queue.front().piece.bytes};
  try {
    const size_t moved = link.stream->send({parts.data(), count});
    moved_ |= moved > 0;
    link.together = piece && moved < headers;
    for (size_t left = std::min(moved, headers); left > 0;) {
      const size_t now = std::min(left, sizeof(Header) - link.outbox_sent);
      link.outbox_sent += now;
      left -= now;
      if (link.outbox_sent == sizeof(Header)) link.outbox.pop_front(), link.outbox_sent = 0;
    }
    if (!piece || moved < headers) return 0;
    Piece& first = link.queue.front().piece;
    first.data += moved - headers;
    first.bytes -= moved - headers;
    if (first.bytes == 0) link.queue.pop_front();
    return moved - headers;
  } catch (const Stream::Broken& broken) {
    // If this rank has not announced data, the failure does not matter yet: the peer may have sent everything that we are waiting
    // for and then exited, and its data can still be read.
    if (link.announced || !link.queue.empty()) {
      link.unsent = broken;
    } else {
      link.outbox.clear();
      link.outbox_sent = 0;
    }
    return 0;
  }
}

bool Mesh::receive_some(int peer) {
  Link& link = links_[peer];
  if (!link.listens()) return false;
  try {
    if (link.due) {
      const size_t moved = link.stream->receive(link.receive_at, std::min(link.receive_left, at_once_bytes));
      link.receive_at += moved;
      link.receive_left -= moved;
      return moved > 0;
    }
    const size_t before = link.unused().size(), piece = link.receiving ? link.receive_left : 0;
    copy(arrivals_.data(), link.unused().data(), before);
    // If the peer has sent several short messages, they arrive together.
    const size_t room = (piece > 0 && piece <= together_bytes ? arrivals_.size() : sizeof(Header)) - before;
    const size_t moved = link.stream->receive(arrivals_.data() + before, room);
    if (moved == 0) return false;
    const std::span<const char> all{arrivals_.data(), before + moved}, rest = all.subspan(use(peer, all));
    link.early.assign(rest.begin(), rest.end());
    link.early_used = 0;
    return true;
  } catch (const Stream::Broken& broken) {
    link.ended = broken;
    return false;
  }
}

void Mesh::use_early(int peer) {
  Link& link = links_[peer];
  if (!link.early.empty()) link.early_used += use(peer, link.unused());
}

size_t Mesh::use(int peer, std::span<const char> bytes) {
  Link& link = links_[peer];
  const size_t all = bytes.size();
  while (!link.due && bytes.size() >= sizeof(Header)) {
    Header header;
    copy(&header, bytes.data(), sizeof header);
    if (!compare(peer, header)) break;
    bytes = bytes.subspan(sizeof header);
  }
  if (link.due && link.receiving) {
    const size_t moved = std::min(bytes.size(), link.receive_left);
    copy(link.receive_at, bytes.data(), moved);
    link.receive_at += moved;
    link.receive_left -= moved;
    bytes = bytes.subspan(moved);
  }
  return all - bytes.size();
}

bool Mesh::compare(int peer, const Header& header) {
  Link& link = links_[peer];
  if (header.magic != frame_magic || header.wire != wire_version || header.epoch != epoch_ || header.payload > 1 ||
      header.source != static_cast<uint32_t>(peer) || !header.signature.valid())
    throw Error("Error", link.stream->peer() + " sent an invalid header (wire " + std::to_string(header.wire) + ", epoch " +
                             std::to_string(header.epoch) + "); the link cannot be trusted any more");
  const Signature& theirs = header.signature;
  if (theirs.number > mine_.number) return false;
  if (theirs.number == mine_.number) {
    if (theirs != mine_) throw Differs{{{rank_, mine_}, {peer, theirs}}};
    const uint64_t sent = sends_.empty() ? 0 : sends_[peer], expected = expects_.empty() ? 0 : expects_[peer];
    if (header.sends != expected) throw counts_differ(mine_, ranks_[peer], header.sends, ranks_[rank_], expected);
    if (header.expects != sent) throw counts_differ(mine_, ranks_[rank_], sent, ranks_[peer], header.expects);
    link.due = header.payload;
  } else {
    // This is the header of an earlier call, which this rank completed without waiting for the header. That was correct only if
    // the header announces no data and its signature equals that of our own call with the same number. Otherwise, the peer made a
    // different call.
    const auto ours = recorded_(theirs.number);
    if (header.payload || (ours && *ours != theirs)) throw Differs{{{rank_, ours.value_or(mine_)}, {peer, theirs}}};
  }
  return true;
}

void Mesh::look(const Wait& wait) {
  take_new_links();
  wait.look({.ranks = [this] { return missing(); },
             .linked =
                 [this](int peer) {
                   const std::lock_guard lock(new_mutex_);
                   return links_[peer].stream || expected_[peer];
                 }});
  std::vector<Piece> absent;
  for (int peer : missing()) {
    if (!links_[peer].stream) {
      absent.push_back({peer, nullptr, 0});
      continue;
    }
    try {
      links_[peer].stream->check_silence();
    } catch (const Stream::Broken& broken) {
      throw lost(peer, broken);
    }
  }
  need(absent, true);
  looked_ = Clock::now();
}

void Mesh::poll_links(const Wait& wait) {
  Poll links;
  std::vector<int> peers;  // the peer of each entry; -1 for the bell
  size_t needed = 0;
  if (bell_.get() >= 0) {  // only this thread changes bell_
    links.add(bell_.get());
    peers.push_back(-1);
  }
  // First the links for which this rank waits. The others have something to read only if the ranks have made different calls.
  for (const bool first : {true, false}) {
    for (int peer = 0; peer < size(); peer++) {
      const Link& link = links_[peer];
      if (!link.stream) continue;
      const bool sends = !link.outbox.empty() || (!link.queue.empty() && (others_ == Others::go || peer == next()));
      if ((!link.listens() && !sends) || (sends || !link.received()) != first) continue;
      links.add(*link.stream, link.listens(), sends);
      peers.push_back(peer);
    }
    if (first) needed = peers.size();
  }
  const bool looks_at_wire = others_ == Others::wait;
  const int ready = links.wait(looks_at_wire ? look_at_wire_ms : longest_sleep_ms,
                               Poll::Awake{spin_, [&wait] { return wait.watch.broken(); }, needed});
  if (ready == 0 && looks_at_wire) return;
  // If wait() has timed out, send the header of the current call to each peer whose data is missing. Do not send the header
  // earlier, because a peer may have sent its data and exited. If we sent anything to such a peer, our kernel would discard the
  // peer's data that we have not read yet.
  for (int peer = 0; peer < size(); peer++)
    if (const Link& link = links_[peer]; ready == 0 && link.stream && !link.greeted && !link.received()) greet(peer, false);
  if (ready <= 0) {
    last_look();
    look(wait);
  }
  for (size_t i = 0; ready > 0 && i < peers.size(); i++) {
    if (!links.readable(i)) continue;
    if (peers[i] < 0) take_new_links();
    else receive_some(peers[i]);
  }
}

std::vector<int> Mesh::missing() const {
  std::vector<int> ranks;
  // If data from some peers is missing, return only those peers. A peer that accepts no data may be waiting for the same peers as
  // we are.
  const bool coming = !all_received();
  for (int peer = 0; peer < size(); peer++) {
    const Link& link = links_[peer];
    if (coming ? !link.received() : !link.sent()) ranks.push_back(peer);
  }
  return ranks;
}

Error Mesh::lost(int peer, const Stream::Broken& broken) const {
  return peer_lost(ranks_[peer], "the link to " + links_[peer].stream->peer() + " ended: " + broken.why);
}

void Mesh::need(std::span<const Piece> pieces, bool has_waited) {
  bool wants = false;
  for (const Piece& piece : pieces)
    if (!links_[piece.peer].stream) wants |= needs(piece.peer, has_waited);
  if (wants) wants_();
}

// Returns whether wanted() will return this peer, which has no link.
bool Mesh::needs(int peer, bool has_waited) {
  Link& link = links_[peer];
  if (link.needed && (link.wanted || !has_waited)) return false;
  link.needed = true;
  const std::lock_guard lock(new_mutex_);
  // If this process has no descriptor left, bell_ stays -1, and this rank finds a new link when it next looks. But then the link
  // will probably not be made either, and the thread that makes it reports the shortage.
  if (bell_.get() < 0) bell_.reset(eventfd(has_new_links_, EFD_CLOEXEC | EFD_NONBLOCK));
  if (expected_[peer] || (peer > rank_ && !has_waited)) return false;
  link.wanted = true;
  wanted_.push_back(peer);
  return true;
}

void Mesh::need_unsent() {
  std::vector<Piece> unsent;
  for (int peer = 0; peer < size(); peer++)
    if (!links_[peer].sent()) unsent.push_back({peer, nullptr, 0});
  need(unsent, true);
}

std::vector<int> Mesh::wanted() {
  const std::lock_guard lock(new_mutex_);
  return std::exchange(wanted_, {});
}

void Mesh::expect(int peer) {
  const std::lock_guard lock(new_mutex_);
  expected_.at(peer) = true;
}

void Mesh::add(int peer, Stream stream) {
  const std::lock_guard lock(new_mutex_);
  Link& link = links_.at(peer);
  if (ended_ || link.stream || link.added) return;
  expected_[peer] = true;
  link.added.emplace(std::move(stream));
  has_new_links_ = true;
  if (bell_.get() >= 0) eventfd_write(bell_.get(), 1);
}

void Mesh::take_new_links() {
  if (!has_new_links_) return;
  const std::lock_guard lock(new_mutex_);
  has_new_links_ = false;
  bool lacks = false;
  for (Link& link : links_) {
    if (link.added) link.stream.emplace(std::move(*std::exchange(link.added, std::nullopt)));
    lacks |= link.needed && !link.stream;
  }
  if (!lacks) bell_.close();
  eventfd_t rung;
  if (bell_.get() >= 0) eventfd_read(bell_.get(), &rung);
}

void Mesh::shut_down() {
  const std::lock_guard lock(new_mutex_);
  ended_ = true;
  for (const Link& link : links_)
    for (const auto* stream : {&link.stream, &link.added})
      if (*stream) (*stream)->shut_down();
  if (bell_.get() >= 0) eventfd_write(bell_.get(), 1);
}

void Mesh::close(double timeout_s) {
  std::vector<std::optional<Stream>> streams;
  {
    const std::lock_guard lock(new_mutex_);
    ended_ = true;
    for (Link& link : links_)
      for (auto* stream : {&link.stream, &link.added}) streams.push_back(std::exchange(*stream, std::nullopt));
  }
  deliver_all(std::move(streams), timeout_s);
}

void Mesh::close_descriptors() {
  for (Link& link : links_)
    for (auto* stream : {&link.stream, &link.added})
      if (*stream) (*stream)->abandon();
  bell_.close();
}

}  // namespace mscomm
