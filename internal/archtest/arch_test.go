package archtest

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/tierlimit/tierlimit"

// coreModules are the only modules that the packages users import may import themselves.
var coreModules = []string{
	"github.com/redis/go-redis/v9",
	"github.com/cespare/xxhash/v2",
	"go.uber.org/zap",
	"github.com/sony/gobreaker/v2",
}

// testModules may be imported by the root module's tests and its internal packages, besides coreModules.
var testModules = []string{
	"pgregory.net/rapid",
	"go.uber.org/goleak",
	"golang.org/x/sys",
}

// barredModules must not appear in the root's go.mod, not even indirectly: importing the core must never raise a user's own.
var barredModules = []string{
	"go.opentelemetry.io",
	"google.golang.org/grpc",
	"github.com/docker",
	"github.com/moby",
	"github.com/testcontainers",
	"github.com/prometheus",
}

// A rule says which of our packages the packages below a path may import, tests aside. A path is relative to the
// root module; "" is the root package, and a pattern that ends in /... takes in what is below.
type rule struct {
	who  string
	may  []string
	free bool // any third-party module, where go.mod allows it: nested modules
}

// The first rule that fits a package holds for it, so a package that no rule fits is an error: its author decides.
var rules = []rule{
	{who: "", may: []string{"tier", "tier/local", "tier/remote", "breaker", "internal/clock"}},
	{who: "tier"},
	{who: "breaker"},
	{who: "internal/clock"},
	{who: "tier/remote/lua", may: []string{"tier"}},
	{who: "internal/model", may: []string{"tier", "tier/remote/lua"}}, // what each script must answer, in Go
	{who: "tier/local", may: []string{"tier"}},
	{who: "tier/remote", may: []string{"tier", "tier/remote/lua"}},
	{who: "httplimit", may: []string{""}},
	{who: "debuglimit", may: []string{""}},
	{who: "grpclimit", may: []string{""}, free: true},
	{who: "promlimit", may: []string{""}, free: true},
	{who: "otellimit", may: []string{""}, free: true},
	{who: "examples/...", may: []string{"", "httplimit", "debuglimit", "grpclimit", "promlimit", "otellimit"}, free: true},
	{who: "cmd/tierlimit/...", may: []string{"", "breaker", "tier/...", "internal/fleet", "internal/envelope", "internal/redistest", "httplimit", "debuglimit", "cmd/tierlimit/..."}, free: true},
	{who: "bench/...", may: []string{"", "breaker", "tier/...", "internal/fleet", "internal/envelope", "internal/redistest", "bench/..."}, free: true},
	// The judge must not share code with what it judges; the plain data of tier is all it may know.
	{who: "internal/envelope", may: []string{"tier"}},
	{who: "internal/redistest"},
	{who: "internal/fleet/...", may: []string{"", "breaker", "tier", "internal/fleet/...", "internal/envelope", "internal/redistest"}},
	{who: "internal/chaos", may: []string{"", "breaker", "tier", "internal/fleet", "internal/envelope", "internal/redistest"}},
	{who: "internal/chaosreport", may: []string{"internal/chaos", "internal/redistest"}, free: true},
	{who: "internal/containertest", may: []string{"internal/chaos", "internal/redistest"}, free: true},
	{who: "internal/archtest"},
	{who: "internal/apilist"},
}

func matches(pattern, rel string) bool {
	if below, ok := strings.CutSuffix(pattern, "/..."); ok {
		return rel == below || strings.HasPrefix(rel, below+"/")
	}
	return rel == pattern
}

func ruleFor(rel string) (rule, bool) {
	for _, r := range rules {
		if matches(r.who, rel) {
			return r, true
		}
	}
	return rule{}, false
}

// within says whether an import path belongs to one of the modules.
func within(modules []string, imported string) bool {
	return slices.ContainsFunc(modules, func(m string) bool { return imported == m || strings.HasPrefix(imported, m+"/") })
}

// A file is one Go file of the repository as the rules see it.
type file struct {
	dir     string // of its package, relative to the root, "" for the root itself
	name    string
	test    bool
	doc     bool
	imports []string
}

func (f file) internal() bool {
	return f.dir == "internal" || strings.HasPrefix(f.dir, "internal/")
}

// faults are what the rules find wrong with a file.
func faults(f file) []string {
	r, ok := ruleFor(f.dir)
	if !ok {
		return []string{"no rule says what this package may import: add one to internal/archtest"}
	}
	var out []string
	for _, imported := range f.imports {
		first, _, _ := strings.Cut(imported, "/")
		switch {
		case imported == "C" || imported == "unsafe":
			// Neither is a matter of layout; the linter asks for reasons.
		case imported == module || strings.HasPrefix(imported, module+"/"):
			target := strings.TrimPrefix(strings.TrimPrefix(imported, module), "/")
			// A test may reach for the harness and for its peers.
			if f.test || target == f.dir {
				continue
			}
			if !slices.ContainsFunc(r.may, func(p string) bool { return matches(p, target) }) {
				out = append(out, "may not import "+imported)
			}
		case !strings.Contains(first, "."):
			// The standard library.
		case r.free || within(coreModules, imported):
		case (f.test || f.internal()) && within(testModules, imported):
		default:
			out = append(out, "may not import "+imported+": the core knows go-redis, xxhash, zap, gobreaker and the standard library only")
		}
	}
	return out
}

// The rules find what they are there to find.
func TestArchRulesBite(t *testing.T) {
	for _, tc := range []struct {
		f    file
		want int
	}{
		{file{dir: "", imports: []string{"time", module + "/tier/local", "go.uber.org/zap/zapcore"}}, 0},
		{file{dir: "", imports: []string{module + "/internal/fleet"}}, 1},
		{file{dir: "", imports: []string{"google.golang.org/grpc", "pgregory.net/rapid"}}, 2},
		{file{dir: "", test: true, imports: []string{"pgregory.net/rapid", module + "/internal/redistest"}}, 0},
		{file{dir: "", test: true, imports: []string{"github.com/alicebob/miniredis/v2"}}, 1},
		{file{dir: "tier", imports: []string{module}}, 1},
		{file{dir: "tier", imports: []string{module + "/tier/local"}}, 1},
		{file{dir: "tier/local", imports: []string{module + "/tier"}}, 0},
		{file{dir: "tier/local", imports: []string{module + "/tier/remote"}}, 1},
		{file{dir: "tier/remote/lua", imports: []string{"embed", module + "/tier"}}, 0},
		{file{dir: "tier/remote/lua", imports: []string{module + "/tier/remote"}}, 1},
		{file{dir: "breaker", imports: []string{module + "/tier"}}, 1},
		{file{dir: "httplimit", imports: []string{"net/http", module}}, 0},
		{file{dir: "httplimit", imports: []string{module + "/tier"}}, 1},
		{file{dir: "grpclimit", imports: []string{"google.golang.org/grpc", module}}, 0},
		{file{dir: "grpclimit", imports: []string{module + "/tier/local"}}, 1},
		{file{dir: "internal/envelope", imports: []string{module, module + "/tier/local"}}, 2},
		{file{dir: "internal/fleet", imports: []string{module, module + "/internal/envelope"}}, 0},
		{file{dir: "cmd/tierlimit", imports: []string{"github.com/alicebob/miniredis/v2", module + "/internal/fleet"}}, 0},
		{file{dir: "cmd/tierlimit", imports: []string{module + "/internal/chaos"}}, 1},
		{file{dir: "common"}, 1},
		{file{dir: "pkg/util"}, 1},
	} {
		if got := faults(tc.f); len(got) != tc.want {
			t.Errorf("%+v: got %q, want %d faults", tc.f, got, tc.want)
		}
	}
}

func TestArchImports(t *testing.T) {
	root := repositoryRoot(t)
	files := goFiles(t, root)
	if len(files) < 10 {
		t.Fatalf("only %d Go files found below %s", len(files), root)
	}
	for _, f := range files {
		for _, fault := range faults(f) {
			t.Errorf("%s: %s", path.Join(f.dir, f.name), fault)
		}
	}
}

func TestArchEveryPackageHasADocComment(t *testing.T) {
	documented := map[string]int{}
	for _, f := range goFiles(t, repositoryRoot(t)) {
		if f.test {
			continue
		}
		documented[f.dir] += 0
		if f.doc {
			documented[f.dir]++
		}
	}
	for dir, n := range documented {
		if n != 1 {
			t.Errorf("package %s: %d package comments, want 1", path.Join(module, dir), n)
		}
	}
}

func TestArchCoreModule(t *testing.T) {
	mod := readMod(t, repositoryRoot(t))
	if mod.Module.Path != module {
		t.Errorf("the root module is %s, want %s", mod.Module.Path, module)
	}
	if len(mod.Replace) > 0 || len(mod.Tool) > 0 {
		t.Error("the root go.mod has a replace or a tool line: neither may reach users")
	}
	for _, r := range mod.Require {
		if within(barredModules, r.Path) {
			t.Errorf("the root go.mod requires %s, and so raises it for every user of the core", r.Path)
		}
		if !r.Indirect && !slices.Contains(coreModules, r.Path) && !slices.Contains(testModules, r.Path) {
			t.Errorf("the root go.mod requires %s directly", r.Path)
		}
	}
}

// Every module but tools is in the workspace; nested ones take the root by path, so that tidy works before a release.
func TestArchNestedModules(t *testing.T) {
	root := repositoryRoot(t)
	var work struct{ Use []struct{ DiskPath string } }
	goJSON(t, root, &work, "work", "edit", "-json", filepath.Join(root, "go.work"))
	var used []string
	for _, u := range work.Use {
		used = append(used, path.Clean(u.DiskPath))
	}
	for _, dir := range moduleDirs(t, root) {
		if dir == "." {
			continue
		}
		mod := readMod(t, filepath.Join(root, dir))
		if want := path.Join(module, dir); mod.Module.Path != want {
			t.Errorf("%s/go.mod: module %s, want %s", dir, mod.Module.Path, want)
		}
		if dir == "tools" {
			continue
		}
		if !slices.Contains(used, dir) {
			t.Errorf("%s is not in go.work", dir)
		}
		required, replaced := false, false
		for _, r := range mod.Require {
			required = required || r.Path == module && r.Version == "v0.0.0"
		}
		for _, r := range mod.Replace {
			replaced = replaced || r.Old.Path == module && filepath.Join(root, dir, r.New.Path) == root
		}
		if !required || !replaced {
			t.Errorf("%s/go.mod must require %s v0.0.0 and replace it by the path to the root", dir, module)
		}
	}
	if slices.Contains(used, "tools") {
		t.Error("tools is in go.work: its requirements would raise everyone's")
	}
}

func repositoryRoot(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

type goMod struct {
	Module  struct{ Path string }
	Require []struct {
		Path, Version string
		Indirect      bool
	}
	Replace []struct{ Old, New struct{ Path string } }
	Tool    []struct{ Path string }
}

func readMod(t *testing.T, dir string) goMod {
	t.Helper()
	var mod goMod
	goJSON(t, dir, &mod, "mod", "edit", "-json")
	return mod
}

func goJSON(t *testing.T, dir string, into any, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, into)
	}
	if err != nil {
		t.Fatalf("go %s in %s: %v", strings.Join(args, " "), dir, err)
	}
}

// walk calls visit for every file below root that is part of the repository's source.
func walk(t *testing.T, root string, visit func(dir, name string)) {
	t.Helper()
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); p != root && (strings.HasPrefix(n, ".") || strings.HasPrefix(n, "_") || n == "testdata" || n == "bin") {
				return fs.SkipDir
			}
			return nil
		}
		rel, err := filepath.Rel(root, filepath.Dir(p))
		if err != nil {
			return err
		}
		visit(filepath.ToSlash(rel), d.Name())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func moduleDirs(t *testing.T, root string) []string {
	t.Helper()
	var dirs []string
	walk(t, root, func(dir, name string) {
		if name == "go.mod" {
			dirs = append(dirs, dir)
		}
	})
	return dirs
}

func goFiles(t *testing.T, root string) []file {
	t.Helper()
	var files []file
	fset := token.NewFileSet()
	walk(t, root, func(dir, name string) {
		if !strings.HasSuffix(name, ".go") {
			return
		}
		full := filepath.Join(root, dir, name)
		text, err := os.ReadFile(full)
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := parser.ParseFile(fset, full, text, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		f := file{dir: strings.TrimPrefix(dir, "."), name: name, test: strings.HasSuffix(name, "_test.go")}
		f.doc = hasDoc(parsed.Doc)
		for _, spec := range parsed.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			f.imports = append(f.imports, imported)
		}
		files = append(files, f)
	})
	return files
}

func hasDoc(doc *ast.CommentGroup) bool { return doc != nil && strings.TrimSpace(doc.Text()) != "" }
