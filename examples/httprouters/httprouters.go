// Package httprouters puts httplimit into routers: net/http's ServeMux, chi and echo v5 take Middleware.Handler as it is, gin and echo v4
// need the few lines here. All of them are run by the tests of this package.
package httprouters

import (
	"net/http"

	"github.com/gin-gonic/gin"
	"github.com/go-chi/chi/v5"
	echov4 "github.com/labstack/echo/v4"
	"github.com/labstack/echo/v5"

	"github.com/tierlimit/tierlimit/httplimit"
)

// Gin is m for gin, for a group of routes or before the handlers of one. It tells Route which pattern has matched.
func Gin(m *httplimit.Middleware) gin.HandlerFunc {
	return func(c *gin.Context) {
		passed := false
		next := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			passed = true
			c.Request = r // with the charge in its context
			c.Next()
		})
		c.Request.Pattern = c.FullPath()
		m.Handler(next).ServeHTTP(c.Writer, c.Request)
		if !passed {
			c.Abort()
		}
	}
}

// EchoV4 is m for echo v4. It tells Route which pattern has matched, which echo.WrapMiddleware of v4 leaves out.
func EchoV4(m *httplimit.Middleware) echov4.MiddlewareFunc {
	limited := echov4.WrapMiddleware(m.Handler)
	return func(next echov4.HandlerFunc) echov4.HandlerFunc {
		h := limited(next)
		return func(c echov4.Context) error {
			c.Request().Pattern = c.Path()
			return h(c)
		}
	}
}

// Handlers is what the routers below serve: two routes.
type Handlers struct{ Item, Search http.HandlerFunc }

// ServeMux has m around each handler, since it knows the pattern only then.
func ServeMux(m *httplimit.Middleware, h Handlers) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /items/{id}", m.Handler(h.Item))
	mux.Handle("/search", m.Handler(h.Search))
	return mux
}

// Chi has m in With, which runs behind the router. In Use it would run before, where there is no pattern yet; with a Key that needs none
// it can stand there.
func Chi(m *httplimit.Middleware, h Handlers) http.Handler {
	r := chi.NewRouter()
	limited := r.With(m.Handler)
	limited.Get("/items/{id}", h.Item)
	limited.HandleFunc("/search", h.Search)
	return r
}

// GinEngine has m in a group. In Use of the engine it would run for paths that match no route too, which have no pattern.
func GinEngine(m *httplimit.Middleware, h Handlers) http.Handler {
	gin.SetMode(gin.ReleaseMode)
	r := gin.New()
	limited := r.Group("/", Gin(m))
	limited.GET("/items/:id", gin.WrapF(h.Item))
	limited.Any("/search", gin.WrapF(h.Search))
	return r
}

// Echo has m at each route, for the same reason. v5 sets the pattern itself.
func Echo(m *httplimit.Middleware, h Handlers) http.Handler {
	e := echo.New()
	limited := echo.WrapMiddleware(m.Handler)
	e.GET("/items/:id", echo.WrapHandler(h.Item), limited)
	e.Any("/search", echo.WrapHandler(h.Search), limited)
	return e
}

// EchoV4Router is Echo for v4.
func EchoV4Router(m *httplimit.Middleware, h Handlers) http.Handler {
	e := echov4.New()
	limited := EchoV4(m)
	e.GET("/items/:id", echov4.WrapHandler(h.Item), limited)
	e.Any("/search", echov4.WrapHandler(h.Search), limited)
	return e
}
