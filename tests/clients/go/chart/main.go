// chart renders the templates of a Helm chart: `chart DIRECTORY < CONTEXT`, with text/template as Helm does and those
// of Helm's functions that the chart uses; another one is an error. CONTEXT is JSON: Values and Release. toYaml prints
// JSON, which is YAML.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"text/template"
)

func toJSON(value any) (string, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(value)
	return strings.TrimSuffix(out.String(), "\n"), err
}

func empty(value any) bool {
	if value == nil {
		return true
	}
	if found := reflect.ValueOf(value); found.Kind() == reflect.Map || found.Kind() == reflect.Slice {
		return found.Len() == 0
	}
	return reflect.ValueOf(value).IsZero()
}

func nindent(count int, text string) string {
	space := strings.Repeat(" ", count)
	return "\n" + space + strings.ReplaceAll(text, "\n", "\n"+space)
}

func run(directory string) error {
	var context map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&context); err != nil {
		return err
	}
	root := template.New("chart").Option("missingkey=zero")
	root.Funcs(template.FuncMap{
		"toYaml": toJSON, "toJson": toJSON, "nindent": nindent,
		"quote":     func(value any) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"replace":   func(old, with, text string) string { return strings.ReplaceAll(text, old, with) },
		"sha256sum": func(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) },
		"dict":      func() map[string]any { return map[string]any{} },
		"default": func(fallback, value any) any {
			if empty(value) {
				return fallback
			}
			return value
		},
		"fail":       func(message string) (string, error) { return "", errors.New(message) },
		"lower":      strings.ToLower,
		"regexMatch": func(pattern, text string) (bool, error) { return regexp.MatchString(pattern, text) },
		"include": func(name string, data any) (string, error) {
			var out bytes.Buffer
			err := root.ExecuteTemplate(&out, name, data)
			return out.String(), err
		},
	})
	paths, err := filepath.Glob(filepath.Join(directory, "templates", "*"))
	if err != nil {
		return err
	}
	if _, err := root.ParseFiles(paths...); err != nil {
		return err
	}
	for _, path := range paths {
		if filepath.Ext(path) != ".yaml" {
			continue
		}
		fmt.Println("---")
		if err := root.ExecuteTemplate(os.Stdout, filepath.Base(path), context); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
