package chaos

import (
	"os"
	"strings"
	"testing"
)

// docs/chaos.md says what each fault is and what is demanded while it lasts, and knows no other.
func TestDocsSayWhatEachFaultIs(t *testing.T) {
	text, err := os.ReadFile("../../docs/chaos.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, ok := strings.Cut(string(text), "## The faults\n")
	if !ok {
		t.Fatal("there is no table of faults")
	}
	demanded := map[string]string{} // by topology and fault
	var topologies []string
	for l := range strings.Lines(table) {
		if heading, ok := strings.CutPrefix(l, "### "); ok {
			topologies = nil
			for part := range strings.SplitSeq(heading, ";") {
				name, _, _ := strings.Cut(part, ":")
				topologies = append(topologies, strings.TrimSpace(name))
			}
		}
		cells := strings.Split(l, "|")
		if len(cells) != 5 {
			continue
		}
		for i, name := range strings.Split(cells[1], "`") {
			for _, topology := range topologies {
				if i%2 == 1 {
					demanded[topology+"/"+name] = strings.TrimSpace(cells[3])
				}
			}
		}
	}
	words := map[Course]string{Steady: "unseen", Away: "away", Shares: "shares"}
	known := map[string]bool{}
	for _, f := range faults() {
		name := f.Topology.Name + "/" + f.Name
		known[f.Name] = true
		got, ok := demanded[name]
		switch {
		case !ok:
			t.Errorf("%s is not told of", name)
		case f.Course == Any && got != "" || !strings.Contains(got, words[f.Course]):
			t.Errorf("%s: %q is demanded by the page, not %q", name, got, words[f.Course])
		}
	}
	for name := range demanded {
		if _, fault, _ := strings.Cut(name, "/"); !known[fault] {
			t.Errorf("%s is no fault", name)
		}
	}
}
