// Package lines is what the drivers share: a verb a line comes in as JSON, its answer goes out; the verbs are those of
// tests/kafka/foreign.py.
package lines

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"sync"
)

// Record is [partition, key, value]; a value of nil is a tombstone.
type Record struct {
	Partition int32
	Key       *string
	Value     *string
}

// UnmarshalJSON reads the three from an array.
func (r *Record) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&r.Partition, &r.Key, &r.Value})
}

// Asked is one verb with everything that any of them takes.
type Asked struct {
	Do          string             `json:"do"`
	Bootstrap   string             `json:"bootstrap"`
	User        string             `json:"user"`
	Password    string             `json:"password"`
	Version     string             `json:"version"`
	Mechanism   string             `json:"mechanism"`
	CA          string             `json:"ca"`
	Certificate string             `json:"certificate"`
	Key         string             `json:"key"`
	Topic       string             `json:"topic"`
	To          string             `json:"to"`
	Partition   int32              `json:"partition"`
	Partitions  int32              `json:"partitions"`
	Records     []Record           `json:"records"`
	Idempotent  bool               `json:"idempotent"`
	Compression string             `json:"compression"`
	Count       int                `json:"count"`
	Isolation   string             `json:"isolation"`
	Member      string             `json:"member"`
	Group       string             `json:"group"`
	Strategy    string             `json:"strategy"`
	Instance    string             `json:"instance"`
	Producer    string             `json:"producer"`
	ID          string             `json:"id"`
	TimeoutMs   int                `json:"timeout_ms"`
	Commit      bool               `json:"commit"`
	Offset      int64              `json:"offset"`
	At          int64              `json:"at"`
	Configs     map[string]*string `json:"configs"`
	Principal   string             `json:"principal"`
}

// Committed says whether only what is committed is asked for.
func (a Asked) Committed() bool { return a.Isolation == "read_committed" }

// TLS is what a listener with certificates needs; nil where there is none.
func (a Asked) TLS() (*tls.Config, error) {
	if a.CA == "" {
		return nil, nil
	}
	data, err := os.ReadFile(a.CA)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(data)
	if a.Certificate != "" {
		own, err := tls.LoadX509KeyPair(a.Certificate, a.Key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{own}
	}
	return config, nil
}

// Row is a record as it was read.
func Row(partition int32, offset int64, key, value []byte) []any {
	return []any{partition, offset, text(key), text(value)}
}

func text(data []byte) any {
	if data == nil {
		return nil
	}
	return string(data)
}

// Bytes of a string that may not be there.
func Bytes(s *string) []byte {
	if s == nil {
		return nil
	}
	return []byte(*s)
}

// Seen is what a member of a group has, had and got.
type Seen struct {
	mu          sync.Mutex
	assigned    map[int32]bool
	assignments int
	revoked     int
	got         [][]any
	failed      string
}

// Assigned adds partitions; of nothing it counts as well.
func (s *Seen) Assigned(partitions []int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.assigned == nil {
		s.assigned = map[int32]bool{}
	}
	s.assignments++
	for _, p := range partitions {
		s.assigned[p] = true
	}
}

// Revoked takes partitions away.
func (s *Seen) Revoked(partitions []int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revoked += len(partitions)
	for _, p := range partitions {
		delete(s.assigned, p)
	}
}

// Got adds a record.
func (s *Seen) Got(row []any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, row)
}

// Failed keeps the last error.
func (s *Seen) Failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = err.Error()
}

// State is the answer to the verb.
func (s *Seen) State() any {
	s.mu.Lock()
	defer s.mu.Unlock()
	assigned := []int32{}
	for p := range s.assigned {
		assigned = append(assigned, p)
	}
	sort.Slice(assigned, func(i, j int) bool { return assigned[i] < assigned[j] })
	got := append([][]any{}, s.got...)
	return map[string]any{
		"assigned": assigned, "assignments": s.assignments, "revoked": s.revoked, "got": got, "failed": s.failed,
	}
}

// Serve answers until the input ends; code gives the Kafka code of an error, -1 where it has none.
func Serve(run func(Asked) (any, error), code func(error) int) {
	scanner := bufio.NewScanner(os.Stdin)
	scanner.Buffer(nil, 64<<20)
	for scanner.Scan() {
		var asked Asked
		answer := map[string]any{}
		err := json.Unmarshal(scanner.Bytes(), &asked)
		if err == nil {
			answer["ok"], err = run(asked)
		}
		if err != nil {
			answer = map[string]any{"error": code(err), "message": err.Error()}
		}
		line, err := json.Marshal(answer)
		if err != nil {
			panic(err)
		}
		fmt.Println(string(line))
	}
}
