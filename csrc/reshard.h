// Inside the core: scheduling the flows of a cross-mesh resharding on the hosts' network interfaces (Zhuang et al.,
// "On Optimizing the Communication of Model Parallelism", section 3).
#pragma once

#include "fxpar.h"

#include <cstddef>
#include <vector>

namespace fxpar::reshard {

using Time = int64_t;  // in the greatest common divisor of all flows' bytes: where all are equal, each takes 1

// Flows with the same senders and receivers are of one kind. Host h sends through interface h and receives through
// interface num_hosts + h.
struct Kind {
  std::vector<int> fixed;    // the interfaces that such a flow occupies, whichever host sends it
  std::vector<int> senders;  // the flow also occupies one of these
};

// Flows of one kind that take equally long: they are interchangeable.
struct Class {
  int kind;
  Time time;
  int count;
};

// A flow of some kind occupies at least `times` interfaces of a cut.
struct Share {
  int cut;
  int times;
};

struct Problem {
  int num_interfaces = 0;
  int num_flows = 0;  // the flows that take time
  std::vector<Kind> kinds;
  std::vector<Class> classes;                // kind by kind, the longest first
  std::vector<std::vector<int>> cuts;        // sets of interfaces: each alone, then sets of senders
  std::vector<std::vector<int>> cuts_of;     // by interface: the cuts that it is in
  std::vector<std::vector<Share>> share_of;  // by kind: the cuts that it loads whichever host sends

  const Kind& kind_of(int class_index) const { return kinds[classes[class_index].kind]; }
};

// Fills in the cuts of a problem whose other members are set.
void find_cuts(Problem& problem);

// An amount that the hosts of a set must send, in any division among them.
struct Demand {
  std::vector<int> senders;
  int64_t amount;
};

// The demands of a problem's kinds, one for each distinct set of senders.
std::vector<Demand> find_demands(const Problem& problem);

// The load of each interface that does not depend on the choice of senders.
std::vector<int64_t> find_fixed_loads(const Problem& problem);

// A set of hosts that together must send `load`: load / hosts.size() is a lower bound of the makespan.
struct Bottleneck {
  std::vector<int> hosts;
  int64_t load;
};

// The set of hosts with the greatest load / hosts.size(). Its load is fixed[h] of every host h in it, and all of
// `demands` whose senders are in it. By linear programming duality that quotient is the load of the most loaded host if
// demands, which may be divided arbitrarily, are balanced optimally.
Bottleneck find_bottleneck(const std::vector<int64_t>& fixed, const std::vector<Demand>& demands);

// A flow of a class, the interface that it is sent through, and its start.
struct Placement {
  int class_index;
  int sender;
  Time start;
};

struct Schedule {
  Time makespan = 0;
  std::vector<Placement> placements;
};

// A partial schedule to which flows are appended, and a lower bound of the makespan of its completions.
class Timeline {
 public:
  explicit Timeline(const Problem& problem);

  int size() const { return static_cast<int>(steps_.size()); }
  Time makespan() const { return steps_.empty() ? 0 : steps_.back().makespan; }
  Time bound() const { return steps_.empty() ? initial_bound_ : steps_.back().bound; }
  Time free_from(int interface) const { return free_[interface]; }
  // The sum, over a cut's interfaces, of free_from and of the load that it must still carry.
  Time load(int cut) const { return loads_[cut]; }
  // The same for one interface.
  Time load_of(int interface) const { return loads_[interface]; }
  // When all fixed interfaces of such a flow are free.
  Time earliest(const Kind& kind) const;
  Schedule schedule() const;

  void place(const Placement& placement);
  void append(int class_index, int sender);  // places a flow at its earliest start
  void undo();  // removes the last placement

 private:
  struct Step {
    Placement placement;
    Time makespan;
    Time bound;
  };

  void set_free_from(int interface, Time time);

  const Problem& problem_;
  std::vector<Time> free_;   // by interface
  std::vector<Time> loads_;  // by cut
  std::vector<Time> saved_;  // the values of free_ that placements replaced
  std::vector<Step> steps_;
  Time initial_bound_ = 0;
};

// load / size, rounded up
inline Time divide_up(Time load, std::size_t size) {
  return (load + static_cast<Time>(size) - 1) / static_cast<Time>(size);
}

// Calls visit(interface) for all interfaces that a flow of `kind` occupies if it is sent through `sender`.
template <typename Visit>
void for_each_interface(const Kind& kind, int sender, Visit visit) {
  for (int interface : kind.fixed) visit(interface);
  visit(sender);
}

// Both return the best schedule that they find, or `incumbent` if none is better. They stop at a makespan of `bound`,
// or when `budget`, a count of their smallest steps, is spent.
Schedule search_depth_first(const Problem& problem, Schedule incumbent, Time bound, int64_t budget);
Schedule search_greedily(const Problem& problem, Schedule incumbent, Time bound, int64_t budget, uint64_t seed);

}  // namespace fxpar::reshard
