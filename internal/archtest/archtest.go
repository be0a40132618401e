// Package archtest holds the rules of this repository's shape as a test: who may import whom, which modules the core may
// require, and that every package says what it is for. docs/design.md gives the reasons.
package archtest
