package main

import (
	"bytes"
	"cmp"
	"fmt"
	"image/color"
	"slices"
	"strings"
	"time"

	stdfont "golang.org/x/image/font"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/tierlimit/tierlimit/internal/chaos"
)

// The plots have a background of their own, so that they can be read on dark pages too.
var (
	paper  = color.NRGBA{R: 0xff, G: 0xff, B: 0xff, A: 0xff}
	ink    = color.NRGBA{R: 0x24, G: 0x29, B: 0x2f, A: 0xff}
	faint  = color.NRGBA{R: 0x57, G: 0x60, B: 0x6a, A: 0xff}
	grid   = color.NRGBA{R: 0xe6, G: 0xe9, B: 0xed, A: 0xff}
	blue   = color.NRGBA{R: 0x09, G: 0x69, B: 0xda, A: 0xff}
	sky    = color.NRGBA{R: 0x09, G: 0x69, B: 0xda, A: 0x2e}
	green  = color.NRGBA{R: 0x1a, G: 0x7f, B: 0x37, A: 0xff}
	red    = color.NRGBA{R: 0xcf, G: 0x22, B: 0x2e, A: 0xff}
	blush  = color.NRGBA{R: 0xff, G: 0xeb, B: 0xe0, A: 0xff}
	border = color.NRGBA{R: 0xd0, G: 0xd7, B: 0xde, A: 0xff}
)

// A picture is one plot file.
type picture struct {
	file, alt string
	svg       []byte
}

// A subject is a fault that is drawn.
type subject struct{ topology, fault, title string }

// overview are those for the README.
var overview = []subject{
	{"single", "kill", "Redis is killed, then restarted with its data"},
	{"single", "flapping", "Redis cut off and restored every 200 ms"},
	{"single", "flushall", "Redis loses all its data (FLUSHALL)"},
	{"cluster", "master-crashed", "A master of a Redis Cluster crashes"},
}

var more = []subject{
	{"single", "hang", "Redis hangs, connections stay open"},
	{"single", "one-cut-off", "One of four instances is cut off"},
	{"single", "kill-restart-empty", "Redis is killed, then restarted without its data"},
	{"replica", "failover", "The primary is killed, its replica promoted by hand"},
	{"sentinel", "primary-crashed", "Sentinel: the primary crashes"},
	{"cluster", "master-hung", "A master of a Redis Cluster hangs"},
	{"single", "20-to-200ms-away", "Round trips take 20 to 200 ms"},
	{"single", "50-join-and-leave", "50 more instances join and leave"},
}

const overviewPlot, morePlot, soakPlot = "overview.svg", "more.svg", "soak.svg"

func init() {
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
	plotter.DefaultFont = plot.DefaultFont
}

// drawFaults draws what there are rows of.
func drawFaults(rows []chaos.Row) ([]picture, error) {
	var out []picture
	for _, s := range []struct {
		file, alt string
		of        []subject
	}{
		{overviewPlot, "What a fleet of four admits while Redis fails, against the limit", overview},
		{morePlot, "The same for other faults", more},
	} {
		p, err := sheet(rows, s.of, s.file, s.alt)
		if err != nil {
			return nil, err
		}
		if p.svg != nil {
			out = append(out, p)
		}
	}
	return out, nil
}

// best is the run of a fault that is drawn: one that was judged, if there is one, else the one that the machine disturbed least; a
// sliding log, of which no window may ever hold more than the limit, if there is one.
func best(rows []chaos.Row, s subject) *chaos.Row {
	order := []string{"sliding-log", "sliding-window", "token-bucket", "leaky-bucket", "fixed-window"}
	var found *chaos.Row
	for i := range rows {
		r := &rows[i]
		if r.Topology != s.topology || r.Fault != s.fault || r.SeriesStep <= 0 {
			continue
		}
		if found == nil || cmp.Or(disturbed(r)-disturbed(found), slices.Index(order, r.Algorithm)-slices.Index(order, found.Algorithm)) < 0 {
			found = r
		}
	}
	return found
}

// disturbed is 0 for a run that was judged, else what part of the limit was not admitted where nothing was the matter, in fifths.
func disturbed(r *chaos.Row) int {
	if r.NotJudged == "" {
		return 0
	}
	return 1 + int(5*max(0, 2-r.Before-r.After))
}

// sheet is some faults side by side, two in a row.
func sheet(rows []chaos.Row, of []subject, file, alt string) (picture, error) {
	var plots []*chart
	for _, s := range of {
		r := best(rows, s)
		if r == nil {
			continue
		}
		p, err := panel(r, s.title)
		if err != nil {
			return picture{}, err
		}
		plots = append(plots, p)
	}
	if len(plots) == 0 {
		return picture{}, nil
	}
	columns := min(2, len(plots))
	lines := (len(plots) + columns - 1) / columns
	const width, height = 5.6 * vg.Inch, 2.7 * vg.Inch
	img := vgsvg.New(vg.Length(columns)*width, vg.Length(lines)*height)
	canvas := draw.New(img)
	card(canvas)
	for i, p := range plots {
		x, y := vg.Length(i%columns)*width, vg.Length(lines-1-i/columns)*height
		const gap = 9
		p.draw(draw.Canvas{Canvas: canvas, Rectangle: vg.Rectangle{
			Min: vg.Point{X: x + gap, Y: y + gap}, Max: vg.Point{X: x + width - gap, Y: y + height - gap},
		}})
	}
	svg, err := finish(img)
	return picture{file, alt, svg}, err
}

// card is the background.
func card(c draw.Canvas) {
	c.SetColor(paper)
	c.Fill(c.Rectangle.Path())
	c.SetColor(border)
	c.SetLineWidth(1)
	c.Stroke(c.Rectangle.Path())
}

// finish writes the SVG. Fonts that are not there have others of the same widths.
func finish(img *vgsvg.Canvas) ([]byte, error) {
	var b bytes.Buffer
	if _, err := img.WriteTo(&b); err != nil {
		return nil, err
	}
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans;font-variant:sans;"),
		[]byte("font-family:'Liberation Sans',Arial,Helvetica,sans-serif;")), nil
}

// bare is a plot in our style.
func bare(title, x, y string) *chart {
	p := plot.New()
	p.BackgroundColor = nil
	p.Title.Text = title
	p.Title.TextStyle.Font.Size, p.Title.TextStyle.Font.Weight, p.Title.TextStyle.Color = 11.5, stdfont.WeightBold, ink
	p.Title.Padding = 24 // room for the legend
	p.X.Label.Text, p.Y.Label.Text = x, y
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Label.TextStyle.Font.Size, a.Label.TextStyle.Color = 9.5, faint
		a.Tick.Label.Font.Size, a.Tick.Label.Color = 9, faint
		a.Color, a.Tick.Color = faint, faint
		a.Width, a.Tick.Width, a.Tick.Length = 0.5, 0.5, 4
		a.Padding = 0
	}
	return &chart{Plot: p}
}

// A chart is a plot with its legend in one line below the title.
type chart struct {
	*plot.Plot
	legend []entry
}

type entry struct {
	name  string
	thumb plot.Thumbnailer
}

func (c *chart) name(name string, thumb plot.Thumbnailer) {
	c.legend = append(c.legend, entry{name, thumb})
}

func (c *chart) draw(on draw.Canvas) {
	c.Draw(on)
	const thumb, gap, between = 16, 4, 14
	style := c.Title.TextStyle
	style.Font.Size, style.Font.Weight, style.Color = 9, stdfont.WeightNormal, faint
	style.XAlign, style.YAlign = text.XLeft, text.YCenter
	width := vg.Length(-between)
	for _, e := range c.legend {
		width += thumb + gap + style.Width(e.name) + between
	}
	x, y := on.Center().X-width/2, on.Max.Y-c.Title.TextStyle.Height(c.Title.Text)-11
	for _, e := range c.legend {
		e.thumb.Thumbnail(&draw.Canvas{Canvas: on.Canvas, Rectangle: vg.Rectangle{Min: vg.Point{X: x, Y: y - 4}, Max: vg.Point{X: x + thumb, Y: y + 4}}})
		x += thumb + gap
		on.FillText(style, vg.Point{X: x, Y: y}, e.name)
		x += style.Width(e.name) + between
	}
}

// panel is one run: what was admitted a second, against the limit, while the fault came and went.
func panel(r *chaos.Row, title string) (*chart, error) {
	if r.NotJudged != "" {
		title += ", machine stalled"
	}
	p := bare(title, "seconds since the fault began", "admitted per second")
	limit := float64(r.Limit) / r.Period.Seconds()
	steps := max(1, int(r.Period/r.SeriesStep))
	rate := func(series []int64, keys int) (at plotter.XYs) {
		for i := steps; i < len(series)-1; i++ { // the last step is a part of one
			var sum int64
			for _, n := range series[i-steps+1 : i+1] {
				sum += n
			}
			x := (time.Duration(i+1)*r.SeriesStep - r.FaultFrom).Seconds()
			at = append(at, plotter.XY{X: x, Y: float64(sum) / r.Period.Seconds() / float64(max(1, keys))})
		}
		return at
	}
	lasts := (r.FaultTo - r.FaultFrom).Seconds()
	p.X.Min, p.X.Max = max(-2, 1.2-r.FaultFrom.Seconds()), lasts+4 // without the start, at which all is full
	p.Y.Min, p.Y.Max = 0, limit*1.25

	band, err := plotter.NewPolygon(plotter.XYs{{X: 0, Y: 0}, {X: lasts, Y: 0}, {X: lasts, Y: p.Y.Max}, {X: 0, Y: p.Y.Max}})
	if err != nil {
		return nil, err
	}
	band.Color, band.LineStyle.Width = blush, 0
	lines := plotter.NewGrid()
	lines.Vertical.Width = 0
	lines.Horizontal.Color, lines.Horizontal.Width = grid, 0.6
	most, err := plotter.NewLine(plotter.XYs{{X: p.X.Min, Y: limit}, {X: p.X.Max, Y: limit}})
	if err != nil {
		return nil, err
	}
	most.Color, most.Width, most.Dashes = red, 1.2, []vg.Length{5, 3}
	p.Add(band, lines)

	type curve struct {
		name       string
		at         plotter.XYs
		line, fill color.Color
	}
	kind := strings.ReplaceAll(r.Algorithm, "-", " ")
	curves := []curve{{"all instances (" + kind + ")", rate(r.Series, r.Keys), blue, sky}}
	if r.SparedKeys > 0 {
		hit := slices.Clone(r.Series)
		for i, n := range r.SparedSeries {
			hit[i] -= n
		}
		curves = []curve{
			{"a key of that master (" + kind + ")", rate(hit, r.Keys-r.SparedKeys), blue, sky},
			{"a key of another one", rate(r.SparedSeries, r.SparedKeys), green, nil},
		}
	}
	for _, c := range curves {
		at := clip(c.at, p.X.Min, p.X.Max, p.Y.Max)
		if len(at) == 0 {
			continue
		}
		if c.fill != nil {
			area, err := plotter.NewPolygon(slices.Concat(plotter.XYs{{X: at[0].X}}, at, plotter.XYs{{X: at[len(at)-1].X}}))
			if err != nil {
				return nil, err
			}
			area.Color, area.LineStyle.Width = c.fill, 0
			p.Add(area)
		}
		line, err := plotter.NewLine(at)
		if err != nil {
			return nil, err
		}
		line.Color, line.Width = c.line, 1.4
		p.Add(line)
		p.name(c.name, line)
	}
	p.Add(most)
	p.name("limit", most)
	p.name("fault", band)
	p.X.Tick.Marker, p.Y.Tick.Marker = every(pace(p.X.Max-p.X.Min)), every(limit/2)
	return p, nil
}

// clip leaves out what is outside the plot.
func clip(at plotter.XYs, from, to, top float64) plotter.XYs {
	var out plotter.XYs
	for _, p := range at {
		if p.X >= from && p.X <= to {
			out = append(out, plotter.XY{X: p.X, Y: min(p.Y, top)})
		}
	}
	return out
}

// pace is a step that makes about eight of a length.
func pace(length float64) float64 {
	for _, step := range []float64{0.5, 1, 2, 5, 10, 20, 50, 100, 200} {
		if length/step <= 9 {
			return step
		}
	}
	return length / 8
}

// every has a tick at each multiple.
func every(step float64) plot.Ticker {
	return plot.TickerFunc(func(from, to float64) (ticks []plot.Tick) {
		for n := int(from/step) - 1; float64(n)*step <= to; n++ {
			if v := float64(n) * step; v >= from {
				ticks = append(ticks, plot.Tick{Value: v, Label: fmt.Sprintf("%g", v)})
			}
		}
		return ticks
	})
}

// drawSoak draws what was in use over time, and the lines through it.
func drawSoak(r *chaos.SoakResult) ([]byte, error) {
	const width, height = 3.75 * vg.Inch, 2.4 * vg.Inch
	panels := []struct {
		title string
		of    func(chaos.Sample) float64
		line  chaos.Trend
		unit  float64
	}{
		{"Heap after a collection, MB", func(s chaos.Sample) float64 { return float64(s.Heap) }, r.Heap, 1 << 20},
		{"Goroutines of the fleet and its load", func(s chaos.Sample) float64 { return float64(s.Goroutines) }, r.Goroutines, 1},
		{"Keys in Redis", func(s chaos.Sample) float64 { return float64(s.Keys) }, r.Keys, 1},
	}
	img := vgsvg.New(vg.Length(len(panels))*width, height)
	canvas := draw.New(img)
	card(canvas)
	for i, d := range panels {
		p := bare(d.title, "minutes", "")
		var at plotter.XYs
		for _, s := range r.Samples {
			at = append(at, plotter.XY{X: s.At.Minutes(), Y: d.of(s) / d.unit})
			p.Y.Max = max(p.Y.Max, 1.1*d.of(s)/d.unit)
		}
		p.X.Min, p.X.Max, p.Y.Min = 0, r.Lasted.Minutes(), 0
		p.X.Tick.Marker, p.Y.Tick.Marker = every(pace(p.X.Max)), every(pace(2*p.Y.Max))
		lines := plotter.NewGrid()
		lines.Vertical.Width = 0
		lines.Horizontal.Color, lines.Horizontal.Width = grid, 0.6
		p.Add(lines)
		if len(at) > 0 {
			points, err := plotter.NewScatter(at)
			if err != nil {
				return nil, err
			}
			points.Shape, points.Radius, points.Color = draw.CircleGlyph{}, 1.3, blue
			p.Add(points)
			p.name("between two rounds", points)
		}
		if n := d.line.Samples; n > 1 {
			first := r.Samples[len(r.Samples)-n]
			line, err := plotter.NewLine(plotter.XYs{
				{X: first.At.Minutes(), Y: d.line.First / d.unit}, {X: r.Samples[len(r.Samples)-1].At.Minutes(), Y: d.line.Last / d.unit},
			})
			if err != nil {
				return nil, err
			}
			line.Color, line.Width = red, 1.4
			p.Add(line)
			p.name("trend", line)
		}
		const gap = 9
		x := vg.Length(i) * width
		p.draw(draw.Canvas{Canvas: canvas, Rectangle: vg.Rectangle{Min: vg.Point{X: x + gap, Y: gap}, Max: vg.Point{X: x + width - gap, Y: height - gap}}})
	}
	return finish(img)
}
