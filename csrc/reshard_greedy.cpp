// Randomised greedy search: whenever an interface becomes free, the best of many random maximal sets of flows starts.
#include "random.h"
#include "reshard.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

namespace fxpar::reshard {
namespace {

constexpr int kMostSets = 32;   // scored at one event
constexpr int kFreshSets = 8;   // of these are made anew; the others are the best so far, with one flow forced in
constexpr int kFewestSets = 3;  // scored even if the first is good

// The busy interfaces, as bits: there may be many kinds to try at every event.
class Occupancy {
 public:
  explicit Occupancy(const Problem& problem)
      : words_((problem.num_interfaces + 63) / 64), busy_(words_), fixed_(words_ * problem.kinds.size()),
        senders_(words_ * problem.kinds.size()) {
    for (size_t k = 0; k < problem.kinds.size(); ++k) {
      for (int interface : problem.kinds[k].fixed) set(&fixed_[k * words_], interface);
      for (int sender : problem.kinds[k].senders) set(&senders_[k * words_], sender);
    }
  }

  void clear() { std::fill(busy_.begin(), busy_.end(), 0); }

  void occupy(int interface) { set(busy_.data(), interface); }

  bool allows(int kind) const {
    uint64_t blocked = 0, open = 0;
    for (size_t word = 0; word < words_; ++word) {
      blocked |= fixed_[kind * words_ + word] & busy_[word];
      open |= senders_[kind * words_ + word] & ~busy_[word];
    }
    return blocked == 0 && open != 0;
  }

 private:
  static void set(uint64_t* words, int bit) { words[bit / 64] |= uint64_t{1} << (bit % 64); }

  size_t words_;  // per set of interfaces
  std::vector<uint64_t> busy_;
  std::vector<uint64_t> fixed_, senders_;  // by kind
};

// The score of a partial schedule; smaller is better.
struct Score {
  Time bound;         // on the makespan of all completions
  uint64_t pressure;  // how many cuts are close to the bound, and how close

  bool operator<=(const Score& other) const {
    return std::tie(bound, pressure) <= std::tie(other.bound, other.pressure);
  }
};

using Set = std::vector<Placement>;

// One schedule, from its start to its end.
class Greedy {
 public:
  Greedy(const Problem& problem, uint64_t seed, int most_sets, int64_t& budget)
      : problem_(problem), budget_(budget), random_(seed), most_sets_(most_sets), timeline_(problem),
        occupancy_(problem), scale_(timeline_.bound()), kinds_(problem.kinds.size()),
        classes_of_(problem.kinds.size()) {
    std::iota(kinds_.begin(), kinds_.end(), 0);
    const auto is_heavier = [this](int one, int other) { return load_of(one) > load_of(other); };
    std::stable_sort(kinds_.begin(), kinds_.end(), is_heavier);
    for (size_t c = problem.classes.size(); c-- > 0;) classes_of_[problem.classes[c].kind].push_back(c);
    for (const Class& flows : problem.classes) left_.push_back(flows.count);
  }

  // Stops early, with flows missing, once the makespan cannot be less than `limit`.
  Schedule run(Time limit) {
    while (timeline_.size() < problem_.num_flows && timeline_.bound() < limit) {
      find_candidates();
      if (!candidates_.empty()) start(choose_set());
      now_ = next_event();
    }
    return timeline_.schedule();
  }

 private:
  enum class Order { kByLoad, kAlmostByLoad, kAtRandom };
  static constexpr Order kOrders[] = {Order::kByLoad, Order::kAtRandom, Order::kAlmostByLoad, Order::kAtRandom};

  bool is_free(int interface) const { return timeline_.free_from(interface) <= now_; }

  // When the first interface that is busy now becomes free.
  Time next_event() const {
    Time next = std::numeric_limits<Time>::max();
    for (int interface = 0; interface < problem_.num_interfaces; ++interface)
      if (!is_free(interface)) next = std::min(next, timeline_.free_from(interface));
    return next;
  }

  void find_occupancy() {
    occupancy_.clear();
    for (int interface = 0; interface < problem_.num_interfaces; ++interface)
      if (!is_free(interface)) occupancy_.occupy(interface);
  }

  // Finds the kinds of which a flow can start now.
  void find_candidates() {
    find_occupancy();
    candidates_.clear();
    for (int kind : kinds_)
      if (occupancy_.allows(kind)) candidates_.push_back(kind);
    budget_ -= kinds_.size() / 8;  // these steps are quick
  }

  // The best of many maximal sets of candidates without conflicts; of one set only once the budget is spent.
  Set choose_set() {
    const Time bound = timeline_.bound();
    const bool has_choice = candidates_.size() > 1 || problem_.kinds[candidates_[0]].senders.size() > 1;
    const int most = has_choice ? most_sets_ : 1;
    Set best = make_set(0, {});
    Score best_score = weigh();
    for (int i = 1; i < most && budget_ > 0 && (i < kFewestSets || best_score.bound > bound); ++i) {
      take_back();
      Set set = make_set(i, best);
      const Score score = weigh();
      if (!(score <= best_score)) continue;  // an equal score replaces the best, since changes to it may lead further
      best_score = score;
      best = std::move(set);
    }
    take_back();
    return best;
  }

  // Makes a set, and leaves it on the timeline.
  Set make_set(int number, const Set& best) {
    if (budget_ <= 0) {
      for (int kind : candidates_)
        if (occupancy_.allows(kind)) add(kind, Order::kByLoad);
    } else if (number < kFreshSets) {
      add_candidates(kOrders[number % std::size(kOrders)]);
    } else {
      add_changed(best);
      add_candidates(Order::kAtRandom);
    }
    return set_;
  }

  void take_back() {
    for (; !set_.empty(); set_.pop_back()) timeline_.undo();
    find_occupancy();
  }

  // Adds candidates until none can start any more.
  void add_candidates(Order order) {
    const Time noise = order == Order::kAlmostByLoad ? scale_ / 32 : 0;
    order_.clear();
    for (int kind : candidates_) {
      const Time load = order == Order::kAtRandom ? 0 : load_of(kind);
      order_.push_back({random_.below(noise + 1) - load, random_.next(), kind});
      budget_ -= 1 + problem_.kinds[kind].fixed.size() / 4;
    }
    std::sort(order_.begin(), order_.end());
    for (const auto& [key, tie, kind] : order_)
      if (occupancy_.allows(kind)) add(kind, order);
  }

  // The greatest load of an interface that such a flow is certain to occupy.
  Time load_of(int kind_index) const {
    const Kind& kind = problem_.kinds[kind_index];
    Time load = kind.senders.size() == 1 ? timeline_.load_of(kind.senders[0]) : 0;
    for (int interface : kind.fixed) load = std::max(load, timeline_.load_of(interface));
    return load;
  }

  // Adds the longest flow of a kind that can start, from the least loaded sender; or random ones unless kByLoad.
  void add(int kind, Order order) {
    int sender = -1, found = 0;
    for (int other : problem_.kinds[kind].senders) {
      if (!is_free(other)) continue;
      const bool is_better = ++found == 1 || (order == Order::kByLoad
                                                  ? timeline_.load_of(other) < timeline_.load_of(sender)
                                                  : random_.below(found) == 0);
      if (is_better) sender = other;
    }
    const std::vector<int>& classes = classes_of_[kind];
    const bool takes_any = order != Order::kByLoad && classes.size() > 1 && random_.below(8) == 0;
    add({takes_any ? classes[random_.below(classes.size())] : classes.back(), sender, now_});
  }

  void add(const Placement& placement) {
    const Kind& kind = problem_.kind_of(placement.class_index);
    timeline_.place(placement);
    for_each_interface(kind, placement.sender, [this](int interface) { occupancy_.occupy(interface); });
    set_.push_back(placement);
    budget_ -= kind.fixed.size();
  }

  // Adds a flow through a loaded interface that `set` leaves idle, and those flows of `set` that do not conflict.
  void add_changed(const Set& set) {
    for (const Placement& placement : set) add(placement);
    order_.clear();
    for (int kind : candidates_) order_.push_back({-idle_load_of(problem_.kinds[kind]), random_.next(), kind});
    budget_ -= order_.size();
    take_back();
    const size_t most_idle = std::min<size_t>(order_.size(), 4);
    std::partial_sort(order_.begin(), order_.begin() + most_idle, order_.end());
    add(std::get<2>(order_[random_.below(most_idle)]), Order::kAtRandom);
    for (const Placement& placement : set) {
      bool fits = true;
      for_each_interface(problem_.kind_of(placement.class_index), placement.sender,
                         [&](int interface) { fits = fits && is_free(interface); });
      if (fits) add(placement);
    }
  }

  // The greatest load of an idle interface that such a flow may occupy.
  Time idle_load_of(const Kind& kind) const {
    Time load = 0;
    const auto count = [&](int interface) {
      if (is_free(interface)) load = std::max(load, timeline_.load_of(interface));
    };
    std::for_each(kind.fixed.begin(), kind.fixed.end(), count);
    std::for_each(kind.senders.begin(), kind.senders.end(), count);
    return load;
  }

  // Scores the timeline: interfaces that are idle now stay so until the next event.
  Score weigh() {
    const Time next = next_event();
    Score score{timeline_.bound(), 0};
    for (size_t cut = 0; cut < problem_.cuts.size(); ++cut) {
      Time load = timeline_.load(cut);
      for (int interface : problem_.cuts[cut]) load += std::max<Time>(next - timeline_.free_from(interface), 0);
      const size_t size = problem_.cuts[cut].size();
      score.bound = std::max(score.bound, divide_up(load, size));
      const uint64_t closeness = 1024 * (load / size) / scale_;
      const uint64_t square = closeness * closeness;
      score.pressure += size * square * square;  // steep, so that the greatest count most, but not alone
    }
    budget_ -= problem_.cuts.size() / 4;
    return score;
  }

  void start(const Set& set) {
    for (const Placement& placement : set) {
      timeline_.place(placement);
      if (--left_[placement.class_index] > 0) continue;
      const int kind = problem_.classes[placement.class_index].kind;
      std::vector<int>& classes = classes_of_[kind];
      classes.erase(std::find(classes.begin(), classes.end(), placement.class_index));
      if (classes.empty()) kinds_.erase(std::find(kinds_.begin(), kinds_.end(), kind));
    }
  }

  const Problem& problem_;
  int64_t& budget_;
  Random random_;
  const int most_sets_;
  Timeline timeline_;
  Occupancy occupancy_;
  const Time scale_;
  Time now_ = 0;
  std::vector<int> kinds_;                    // those with flows left
  std::vector<std::vector<int>> classes_of_;  // by kind: those with flows left, the longest last
  std::vector<int> left_;                     // by class: how many of its flows have not started
  std::vector<int> candidates_;               // kinds
  Set set_;                                   // the set that is on the timeline on trial
  std::vector<std::tuple<Time, uint64_t, int>> order_;  // (key, random number, kind)
};

}  // namespace

Schedule search_greedily(const Problem& problem, Schedule incumbent, Time bound, int64_t budget, uint64_t seed) {
  Random seeds(seed);
  for (int run = 0; incumbent.makespan > bound && budget > 0; ++run) {
    // Every other run scores fewer sets, and so makes other choices.
    const int most_sets = run % 2 == 0 ? kMostSets : 1 + static_cast<int>(seeds.below(kMostSets));
    Schedule found = Greedy(problem, seeds.next(), most_sets, budget).run(incumbent.makespan);
    const bool is_complete = static_cast<int>(found.placements.size()) == problem.num_flows;
    if (is_complete && found.makespan < incumbent.makespan) incumbent = std::move(found);
  }
  return incumbent;
}

}  // namespace fxpar::reshard
