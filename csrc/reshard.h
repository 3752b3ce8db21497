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
  std::vector<int> fixed;    // the interfaces that such a flow occupies whoever sends it
  std::vector<int> senders;  // it occupies one more, of these
};

// Flows of one kind that take equally long: nothing tells them apart.
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
  int num_flows = 0;  // that take time
  std::vector<Kind> kinds;
  std::vector<Class> classes;                // kind by kind, the longest first
  std::vector<std::vector<int>> cuts;        // sets of interfaces: each alone, then sets of senders
  std::vector<std::vector<int>> cuts_of;     // by interface: the cuts that it is in
  std::vector<std::vector<Share>> share_of;  // by kind: the cuts that it cannot but load

  const Kind& kind_of(int class_index) const { return kinds[classes[class_index].kind]; }
};

// Adds the cuts to a problem that has all the rest.
void find_cuts(Problem& problem);

// Amounts that any host of a set may send.
struct Demand {
  std::vector<int> senders;
  int64_t amount;
};

// What a problem's kinds demand, by distinct sets of senders.
std::vector<Demand> find_demands(const Problem& problem);

// What each interface carries whoever sends.
std::vector<int64_t> find_fixed_loads(const Problem& problem);

// A set of hosts that must send `load` among them: nothing is faster than load / hosts.size().
struct Bottleneck {
  std::vector<int> hosts;
  int64_t load;
};

// The set of hosts with the greatest quotient, where host h sends fixed[h] and no host outside may send some of
// `demands`. By linear programming duality that is what the most loaded host sends when the demands, cut as finely as
// needed, are balanced best.
Bottleneck find_bottleneck(const std::vector<int64_t>& fixed, const std::vector<Demand>& demands);

// A flow of a class, the interface that it is sent through, and when.
struct Placement {
  int class_index;
  int sender;
  Time start;
};

struct Schedule {
  Time makespan = 0;
  std::vector<Placement> placements;
};

// The interfaces' timetable while flows are appended to it, and a bound on the makespan of whatever may follow.
class Timeline {
 public:
  explicit Timeline(const Problem& problem);

  int size() const { return static_cast<int>(steps_.size()); }
  Time makespan() const { return steps_.empty() ? 0 : steps_.back().makespan; }
  Time bound() const { return steps_.empty() ? initial_bound_ : steps_.back().bound; }
  Time free_from(int interface) const { return free_[interface]; }
  // The sum, over a cut's interfaces, of free_from and of what each will certainly carry.
  Time load(int cut) const { return loads_[cut]; }
  // The same of one interface.
  Time load_of(int interface) const { return loads_[interface]; }
  // When all interfaces are free that such a flow occupies whoever sends it.
  Time earliest(const Kind& kind) const;
  Schedule schedule() const;

  void place(const Placement& placement);
  void append(int class_index, int sender);  // places a flow at the earliest
  void undo();  // takes back the last placement

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

// Calls visit(interface) for all that a flow of `kind` occupies if it is sent through `sender`.
template <typename Visit>
void for_each_interface(const Kind& kind, int sender, Visit visit) {
  for (int interface : kind.fixed) visit(interface);
  visit(sender);
}

// Both return the best schedule that they find, or `incumbent` where none is better. They stop at one as short as
// `bound`, and where `budget`, a count of their smallest steps, is spent.
Schedule search_depth_first(const Problem& problem, Schedule incumbent, Time bound, int64_t budget);
Schedule search_greedily(const Problem& problem, Schedule incumbent, Time bound, int64_t budget, uint64_t seed);

}  // namespace fxpar::reshard
