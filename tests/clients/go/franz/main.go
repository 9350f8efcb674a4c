// franz-go, driven by lines of JSON.
package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"tidemill/clients/lines"
)

const patience = 100 * time.Second

type driver struct {
	connection []kgo.Opt
	admin      *kadm.Client
	members    map[string]*member
	producers  map[string]*kgo.Client
}

type member struct {
	lines.Seen
	client *kgo.Client
	stop   context.CancelFunc
	ended  chan struct{}
}

func main() {
	d := &driver{members: map[string]*member{}, producers: map[string]*kgo.Client{}}
	lines.Serve(d.run, code)
}

func code(err error) int {
	var known *kerr.Error
	if errors.As(err, &known) {
		return int(known.Code)
	}
	return -1
}

func (d *driver) client(more ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append(append([]kgo.Opt{}, d.connection...), more...)...)
}

func (d *driver) run(a lines.Asked) (any, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	switch a.Do {
	case "connect":
		return d.connect(a)
	case "produce":
		opts := []kgo.Opt{kgo.ProducerBatchCompression(codec(a.Compression))}
		if !a.Idempotent {
			opts = append(opts, kgo.DisableIdempotentWrite(), kgo.RequiredAcks(kgo.LeaderAck()))
		}
		client, err := d.client(append(opts, kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
		if err != nil {
			return nil, err
		}
		defer client.Close()
		return send(ctx, client, a)
	case "read":
		return d.read(ctx, a)
	case "join":
		return d.join(a)
	case "state":
		return d.members[a.Member].State(), nil
	case "leave":
		m := d.members[a.Member]
		delete(d.members, a.Member)
		m.stop()
		<-m.ended
		m.client.Close()
		return m.State(), nil
	case "begin":
		return d.begin(ctx, a)
	case "send":
		return send(ctx, d.producers[a.Producer], a)
	case "end":
		return true, d.producers[a.Producer].EndTransaction(ctx, kgo.TransactionEndTry(a.Commit))
	case "close":
		d.producers[a.Producer].Close()
		delete(d.producers, a.Producer)
		return true, nil
	case "transfer":
		return d.transfer(ctx, a)
	}
	return d.administer(ctx, a)
}

func (d *driver) connect(a lines.Asked) (any, error) {
	d.connection = []kgo.Opt{
		kgo.SeedBrokers(strings.Split(a.Bootstrap, ",")...),
		kgo.AllowAutoTopicCreation(),
		kgo.MetadataMaxAge(time.Second),
		kgo.MetadataMinAge(100 * time.Millisecond),
		// a node that is stopped closes its connections: on a busy machine the default of 30 s ends before the next try
		kgo.RetryTimeout(patience),
	}
	config, err := a.TLS()
	if err != nil {
		return nil, err
	}
	if config != nil {
		d.connection = append(d.connection, kgo.DialTLSConfig(config))
	}
	if a.Mechanism != "" {
		d.connection = append(d.connection, kgo.SASL(mechanism(a)))
	}
	client, err := d.client()
	if err != nil {
		return nil, err
	}
	if d.admin != nil {
		d.admin.Close()
	}
	d.admin = kadm.NewClient(client)
	return true, nil
}

func mechanism(a lines.Asked) sasl.Mechanism {
	switch a.Mechanism {
	case "SCRAM-SHA-256":
		return scram.Auth{User: a.User, Pass: a.Password}.AsSha256Mechanism()
	case "SCRAM-SHA-512":
		return scram.Auth{User: a.User, Pass: a.Password}.AsSha512Mechanism()
	case "OAUTHBEARER":
		return oauth.Auth{Token: a.Password}.AsMechanism()
	}
	return plain.Auth{User: a.User, Pass: a.Password}.AsMechanism()
}

func codec(name string) kgo.CompressionCodec {
	switch name {
	case "gzip":
		return kgo.GzipCompression()
	case "snappy":
		return kgo.SnappyCompression()
	case "lz4":
		return kgo.Lz4Compression()
	case "zstd":
		return kgo.ZstdCompression()
	}
	return kgo.NoCompression()
}

func send(ctx context.Context, client *kgo.Client, a lines.Asked) (any, error) {
	records := []*kgo.Record{}
	for _, r := range a.Records {
		records = append(records, &kgo.Record{
			Topic: a.Topic, Partition: r.Partition, Key: lines.Bytes(r.Key), Value: lines.Bytes(r.Value),
		})
	}
	if err := client.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return nil, err
	}
	offsets := []int64{}
	for _, r := range records {
		offsets = append(offsets, r.Offset)
	}
	return offsets, nil
}

func isolation(a lines.Asked) kgo.Opt {
	if a.Committed() {
		return kgo.FetchIsolationLevel(kgo.ReadCommitted())
	}
	return kgo.FetchIsolationLevel(kgo.ReadUncommitted())
}

func (d *driver) read(ctx context.Context, a lines.Asked) (any, error) {
	from := map[int32]kgo.Offset{}
	for p := int32(0); p < a.Partitions; p++ {
		from[p] = kgo.NewOffset().AtStart()
	}
	client, err := d.client(isolation(a), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{a.Topic: from}))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	found := [][]any{}
	for len(found) < a.Count {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return nil, err
		}
		fetches.EachRecord(func(r *kgo.Record) { found = append(found, lines.Row(r.Partition, r.Offset, r.Key, r.Value)) })
	}
	return found, nil
}

func (d *driver) join(a lines.Asked) (any, error) {
	m := &member{ended: make(chan struct{})}
	balancer := kgo.CooperativeStickyBalancer()
	if a.Strategy == "eager" {
		balancer = kgo.RangeBalancer()
	}
	opts := []kgo.Opt{
		kgo.ConsumerGroup(a.Group), kgo.ConsumeTopics(a.Topic), kgo.Balancers(balancer),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit(),
		kgo.SessionTimeout(10 * time.Second), kgo.HeartbeatInterval(300 * time.Millisecond),
		kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, added map[string][]int32) {
			m.Assigned(added[a.Topic])
		}),
		kgo.OnPartitionsRevoked(func(_ context.Context, _ *kgo.Client, taken map[string][]int32) {
			m.Revoked(taken[a.Topic])
		}),
		kgo.OnPartitionsLost(func(_ context.Context, _ *kgo.Client, taken map[string][]int32) {
			m.Revoked(taken[a.Topic])
		}),
	}
	if a.Instance != "" {
		opts = append(opts, kgo.InstanceID(a.Instance))
	}
	client, err := d.client(opts...)
	if err != nil {
		return nil, err
	}
	m.client = client
	ctx, stop := context.WithCancel(context.Background())
	m.stop = stop
	go m.follow(ctx)
	d.members[a.Member] = m
	return true, nil
}

func (m *member) follow(ctx context.Context) {
	defer close(m.ended)
	for {
		fetches := m.client.PollFetches(ctx)
		if ctx.Err() != nil {
			return
		}
		if err := fetches.Err(); err != nil {
			m.Failed(err)
		}
		fetches.EachRecord(func(r *kgo.Record) { m.Got(lines.Row(r.Partition, r.Offset, r.Key, r.Value)) })
		if err := m.client.CommitUncommittedOffsets(context.Background()); err != nil {
			m.Failed(err)
		}
	}
}

func (d *driver) begin(ctx context.Context, a lines.Asked) (any, error) {
	client := d.producers[a.Producer]
	if client == nil {
		opened, err := d.client(kgo.TransactionalID(a.ID), kgo.RecordPartitioner(kgo.ManualPartitioner()),
			kgo.TransactionTimeout(time.Duration(a.TimeoutMs)*time.Millisecond))
		if err != nil {
			return nil, err
		}
		client = opened
		d.producers[a.Producer] = client
		if _, _, err := client.ProducerID(ctx); err != nil {
			return nil, err
		}
	}
	return true, client.BeginTransaction()
}

// lasting is an error of the fetches that the client does not try again by itself. It tells of a broker that is away and
// of a group that it could not join, and goes on.
func lasting(fetches kgo.Fetches) error {
	for _, each := range fetches.Errors() {
		var lost *kgo.ErrGroupSession
		if !errors.As(each.Err, &lost) && !kgo.IsRetryableBrokerErr(each.Err) {
			return each.Err
		}
	}
	return nil
}

// transfer reads from one topic in a group and writes to another, offsets and records in one transaction a poll.
func (d *driver) transfer(ctx context.Context, a lines.Asked) (any, error) {
	client := append(append([]kgo.Opt{}, d.connection...),
		kgo.TransactionalID(a.ID), kgo.ConsumerGroup(a.Group), kgo.ConsumeTopics(a.Topic), kgo.RequireStableFetchOffsets(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	session, err := kgo.NewGroupTransactSession(client...)
	if err != nil {
		return nil, err
	}
	defer session.Close()
	left := a.Count
	for left > 0 {
		fetches := session.PollFetches(ctx)
		if err := lasting(fetches); err != nil {
			return nil, err
		}
		if err := session.Begin(); err != nil {
			return nil, err
		}
		records := []*kgo.Record{}
		fetches.EachRecord(func(r *kgo.Record) {
			records = append(records, &kgo.Record{Topic: a.To, Partition: r.Partition, Key: r.Key, Value: r.Value})
		})
		if err := session.ProduceSync(ctx, records...).FirstErr(); err != nil {
			return nil, err
		}
		committed, err := session.End(ctx, kgo.TryCommit)
		if err != nil {
			return nil, err
		}
		if committed { // else the group moved meanwhile: the session went back to what is committed, and reads it anew
			left -= len(records)
		}
	}
	return left, nil
}

func (d *driver) administer(ctx context.Context, a lines.Asked) (any, error) {
	switch a.Do {
	case "create":
		made, err := d.admin.CreateTopic(ctx, a.Partitions, -1, a.Configs, a.Topic)
		return true, errors.Join(err, made.Err)
	case "delete":
		gone, err := d.admin.DeleteTopic(ctx, a.Topic)
		return true, errors.Join(err, gone.Err)
	case "topics":
		found, err := d.admin.ListTopics(ctx)
		return found.Names(), err
	case "describe":
		found, err := d.admin.ListTopics(ctx, a.Topic)
		return len(found[a.Topic].Partitions), errors.Join(err, found[a.Topic].Err)
	case "grow":
		found, err := d.admin.UpdatePartitions(ctx, int(a.Partitions), a.Topic)
		return true, errors.Join(err, found.Error())
	case "truncate":
		found, err := d.admin.DeleteRecords(ctx, kadm.Offsets{a.Topic: {a.Partition: {
			Topic: a.Topic, Partition: a.Partition, At: a.Offset, LeaderEpoch: -1,
		}}})
		if err != nil {
			return nil, err
		}
		one, _ := found.Lookup(a.Topic, a.Partition)
		return one.LowWatermark, one.Err
	case "offset":
		return d.offset(ctx, a)
	case "configs":
		described, err := d.admin.DescribeTopicConfigs(ctx, a.Topic)
		if err != nil {
			return nil, err
		}
		one, err := described.On(a.Topic, nil)
		found := map[string]string{}
		for _, c := range one.Configs {
			found[c.Key] = c.MaybeValue()
		}
		return found, errors.Join(err, one.Err)
	case "alter":
		changes := []kadm.AlterConfig{}
		for name, value := range a.Configs {
			op := kadm.SetConfig
			if value == nil {
				op = kadm.DeleteConfig
			}
			changes = append(changes, kadm.AlterConfig{Op: op, Name: name, Value: value})
		}
		altered, err := d.admin.AlterTopicConfigs(ctx, changes, a.Topic)
		if err != nil {
			return nil, err
		}
		one, err := altered.On(a.Topic, nil)
		return true, errors.Join(err, one.Err)
	case "groups":
		found, err := d.admin.ListGroups(ctx)
		return found.Groups(), err
	case "group":
		found, err := d.admin.DescribeGroups(ctx, a.Group)
		one := found[a.Group]
		return map[string]any{"state": one.State, "members": len(one.Members)}, errors.Join(err, one.Err)
	case "delete_group":
		gone, err := d.admin.DeleteGroup(ctx, a.Group)
		return true, errors.Join(err, gone.Err)
	case "committed":
		offsets, err := d.admin.FetchOffsets(ctx, a.Group)
		found := map[int32]int64{}
		offsets.Each(func(o kadm.OffsetResponse) {
			if o.Topic == a.Topic {
				found[o.Partition] = o.At
			}
		})
		return found, err
	case "acl_add":
		made, err := d.admin.CreateACLs(ctx, readable(a))
		if err == nil && len(made) > 0 {
			err = made[0].Err
		}
		return true, err
	case "acls":
		described, err := d.admin.DescribeACLs(ctx, kadm.NewACLs().AnyResource().ResourcePatternType(kadm.ACLPatternAny).
			Operations().Allow().AllowHosts().Deny().DenyHosts())
		count := 0
		for _, one := range described {
			err = errors.Join(err, one.Err)
			count += len(one.Described)
		}
		return count, err
	case "acl_delete":
		gone, err := d.admin.DeleteACLs(ctx, readable(a))
		count := 0
		for _, one := range gone {
			err = errors.Join(err, one.Err)
			count += len(one.Deleted)
		}
		return count, err
	}
	return nil, fmt.Errorf("no such verb: %s", a.Do)
}

func readable(a lines.Asked) *kadm.ACLBuilder {
	return kadm.NewACLs().Topics(a.Topic).ResourcePatternType(kadm.ACLPatternLiteral).
		Operations(kadm.OpRead).Allow(a.Principal).AllowHosts("*")
}

func (d *driver) offset(ctx context.Context, a lines.Asked) (any, error) {
	request := kmsg.NewPtrListOffsetsRequest()
	request.ReplicaID = -1
	topic, partition := kmsg.NewListOffsetsRequestTopic(), kmsg.NewListOffsetsRequestTopicPartition()
	topic.Topic, partition.Partition, partition.Timestamp = a.Topic, a.Partition, a.At
	topic.Partitions = append(topic.Partitions, partition)
	request.Topics = append(request.Topics, topic)
	client, err := d.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	for _, shard := range client.RequestSharded(ctx, request) {
		if shard.Err != nil {
			return nil, shard.Err
		}
		one := shard.Resp.(*kmsg.ListOffsetsResponse).Topics[0].Partitions[0]
		return one.Offset, kerr.ErrorForCode(one.ErrorCode)
	}
	return nil, fmt.Errorf("nobody answered")
}
