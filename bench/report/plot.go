package report

import (
	"image/color"
	"io"
	"math"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

var (
	blue   = color.RGBA{R: 0x1b, G: 0x5e, B: 0x9b, A: 0xff}
	orange = color.RGBA{R: 0xd9, G: 0x6b, B: 0x0b, A: 0xff}
	green  = color.RGBA{R: 0x2c, G: 0x8a, B: 0x4b, A: 0xff}
	violet = color.RGBA{R: 0x8a, G: 0x3f, B: 0x9e, A: 0xff}
	grey   = color.RGBA{R: 0x66, G: 0x66, B: 0x66, A: 0xff}
)

// drawn are the subjects of the lines.
var drawn = []struct {
	subject string
	colour  color.Color
}{{lease, blue}, {share0, orange}, {"redis_rate pool=default", green}, {"redis_rate pool=128", violet}, {"rueidis fixed-window", grey}}

// Plot writes an SVG: time by check in process, and checks a second by way of Redis, near and far.
func (res *Results) Plot(w io.Writer) error {
	bars, err := res.bars()
	if err != nil {
		return err
	}
	near, err := res.lines("Redis", "hot", "By way of Redis, one hot key")
	if err != nil {
		return err
	}
	far, err := res.lines("RTT", "zipf10k", "1 ms farther away, zipf over 10,000 keys")
	if err != nil {
		return err
	}
	img := vgsvg.New(14*vg.Inch, 10*vg.Inch)
	canvas := draw.New(img)
	canvas.SetColor(color.White)
	canvas.Fill(canvas.Rectangle.Path())
	top := draw.Crop(canvas, 0, 0, 4.6*vg.Inch, 0)
	bars.Draw(draw.Crop(top, vg.Points(10), -vg.Points(10), vg.Points(10), -vg.Points(10)))
	bottom := draw.Crop(canvas, 0, 0, 0, -5.4*vg.Inch)
	for i, p := range []*plot.Plot{near, far} {
		p.Draw(draw.Crop(bottom, vg.Length(i)*7*vg.Inch+vg.Points(10), vg.Length(i-1)*7*vg.Inch-vg.Points(10), vg.Points(10), -vg.Points(10)))
	}
	_, err = img.WriteTo(w)
	return err
}

// bars are the subjects of one goroutine in process, for each pattern of keys.
func (res *Results) bars() (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = "In process: one goroutine, time by check of a known key"
	p.Y.Label.Text = "ns"
	p.Legend.Top, p.Legend.Left = true, true
	names := values(res.all("Allow", "goroutines=1", serialCPU), "subject")
	if len(names) == 0 {
		return p, nil
	}
	width := vg.Points(12)
	for i, k := range res.patterns() {
		heights := make(plotter.Values, len(names))
		for j, s := range names {
			heights[j], _ = res.serial(k, s).Median("ns/op")
		}
		b, err := plotter.NewBarChart(heights, width)
		if err != nil {
			return nil, err
		}
		b.LineStyle.Width = 0
		b.Color = []color.Color{blue, orange, green}[i]
		b.Offset = vg.Length(i-1) * width
		p.Add(b)
		p.Legend.Add(k, b)
	}
	p.Y.Min = 0
	p.NominalX(names...)
	p.X.Tick.Label.Rotation = math.Pi / 9
	p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = draw.XRight, draw.YCenter
	return p, nil
}

// lines are checks a second by goroutines.
func (res *Results) lines(bench, keys, title string) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = title
	p.X.Label.Text, p.Y.Label.Text = "goroutines", "checks a second (log)"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.Y.Tick.Marker = plot.LogTicks{Prec: -1}
	p.Legend.Top, p.Legend.Left = true, true
	var ticks plot.ConstantTicks
	for _, n := range values(res.all(bench, "keys="+keys), "goroutines") {
		at, err := strconv.ParseFloat(n, 64)
		if err != nil {
			return nil, err
		}
		ticks = append(ticks, plot.Tick{Value: at, Label: n})
	}
	p.X.Tick.Marker = ticks
	for _, s := range drawn {
		var at plotter.XYs
		for _, t := range ticks {
			if ns, ok := res.remote(bench, s.subject, keys, t.Label).Median("ns/op"); ok {
				at = append(at, plotter.XY{X: t.Value, Y: 1e9 / ns})
			}
		}
		if len(at) == 0 {
			continue
		}
		line, points, err := plotter.NewLinePoints(at)
		if err != nil {
			return nil, err
		}
		line.Color, points.Color = s.colour, s.colour
		line.Width = vg.Points(1.5)
		p.Add(line, points)
		p.Legend.Add(s.subject, line, points)
	}
	if len(ticks) == 0 { // a logarithmic axis needs something above zero
		p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 1, 10, 1, 10
	}
	p.Y.Max *= 20 // room for the legend
	return p, nil
}
