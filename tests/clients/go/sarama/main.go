// sarama, driven by lines of JSON.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/IBM/sarama"

	"tidemill/clients/lines"
)

type driver struct {
	bootstrap []string
	asked     lines.Asked
	tls       *tls.Config
	version   sarama.KafkaVersion
	client    sarama.Client
	admin     sarama.ClusterAdmin
	members   map[string]*member
	producers map[string]sarama.SyncProducer
}

func main() {
	d := &driver{members: map[string]*member{}, producers: map[string]sarama.SyncProducer{}}
	lines.Serve(d.run, code)
}

func code(err error) int {
	var known sarama.KError
	if errors.As(err, &known) {
		return int(known)
	}
	var sent *sarama.ProducerError
	if errors.As(err, &sent) {
		return code(sent.Err)
	}
	var topic *sarama.TopicError
	if errors.As(err, &topic) {
		return int(topic.Err)
	}
	var grown *sarama.TopicPartitionError
	if errors.As(err, &grown) {
		return int(grown.Err)
	}
	var many sarama.ProducerErrors
	if errors.As(err, &many) && len(many) > 0 {
		return code(many[0].Err)
	}
	return -1
}

func (d *driver) config() *sarama.Config {
	c := sarama.NewConfig()
	c.Version = d.version
	c.Consumer.MaxWaitTime = 50 * time.Millisecond // what else is asked of a node waits behind its fetch
	c.Metadata.RefreshFrequency = time.Second
	c.Metadata.Retry.Backoff = 100 * time.Millisecond
	c.Producer.Partitioner = sarama.NewManualPartitioner
	c.Producer.Return.Successes = true
	c.Producer.Retry.Max = 50
	c.Producer.Retry.Backoff = 50 * time.Millisecond
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	c.Consumer.Group.Session.Timeout = 10 * time.Second
	c.Consumer.Group.Heartbeat.Interval = 300 * time.Millisecond
	if d.tls != nil {
		c.Net.TLS.Enable, c.Net.TLS.Config = true, d.tls
	}
	if d.asked.Mechanism != "" {
		c.Net.SASL.Enable = true
		c.Net.SASL.Mechanism = sarama.SASLMechanism(d.asked.Mechanism)
		c.Net.SASL.User, c.Net.SASL.Password = d.asked.User, d.asked.Password
		c.Net.SASL.TokenProvider = token(d.asked.Password)
		c.Net.SASL.SCRAMClientGeneratorFunc = func() sarama.SCRAMClient { return &proof{mechanism: d.asked.Mechanism} }
	}
	return c
}

func (d *driver) run(a lines.Asked) (any, error) {
	switch a.Do {
	case "connect":
		return d.connect(a)
	case "produce":
		return d.produce(a)
	case "read":
		return d.read(a)
	case "join":
		return d.join(a)
	case "state":
		return d.members[a.Member].State(), nil
	case "leave":
		m := d.members[a.Member]
		delete(d.members, a.Member)
		return m.leave()
	case "begin":
		return d.begin(a)
	case "send":
		return send(d.producers[a.Producer], a)
	case "end":
		if a.Commit {
			return true, d.producers[a.Producer].CommitTxn()
		}
		return true, d.producers[a.Producer].AbortTxn()
	case "close":
		err := d.producers[a.Producer].Close()
		delete(d.producers, a.Producer)
		return true, err
	case "transfer":
		return d.transfer(a)
	}
	return d.administer(a)
}

func (d *driver) connect(a lines.Asked) (any, error) {
	d.bootstrap, d.asked = strings.Split(a.Bootstrap, ","), a
	if before := d.admin; before != nil {
		d.admin = nil
		if err := before.Close(); err != nil {
			return nil, err
		}
	}
	d.version = sarama.MaxVersion
	var err error
	if d.tls, err = a.TLS(); err != nil {
		return nil, err
	}
	if a.Version != "" {
		if d.version, err = sarama.ParseKafkaVersion(a.Version); err != nil {
			return nil, err
		}
	}
	if d.client, err = sarama.NewClient(d.bootstrap, d.config()); err != nil {
		return nil, err
	}
	d.admin, err = sarama.NewClusterAdminFromClient(d.client)
	return true, err
}

func idempotent(c *sarama.Config) {
	c.Producer.Idempotent = true
	c.Producer.RequiredAcks = sarama.WaitForAll
	c.Net.MaxOpenRequests = 1
}

func (d *driver) produce(a lines.Asked) (any, error) {
	c := d.config()
	if a.Idempotent {
		idempotent(c)
	}
	if err := c.Producer.Compression.UnmarshalText([]byte(a.Compression)); err != nil {
		return nil, err
	}
	producer, err := sarama.NewSyncProducer(d.bootstrap, c)
	if err != nil {
		return nil, err
	}
	defer func() { _ = producer.Close() }()
	return send(producer, a)
}

func send(producer sarama.SyncProducer, a lines.Asked) (any, error) {
	messages := []*sarama.ProducerMessage{}
	for _, r := range a.Records {
		m := &sarama.ProducerMessage{Topic: a.Topic, Partition: r.Partition}
		if r.Key != nil {
			m.Key = sarama.StringEncoder(*r.Key)
		}
		if r.Value != nil {
			m.Value = sarama.StringEncoder(*r.Value)
		}
		messages = append(messages, m)
	}
	if err := producer.SendMessages(messages); err != nil {
		return nil, err
	}
	offsets := []int64{}
	for _, m := range messages {
		offsets = append(offsets, m.Offset)
	}
	return offsets, nil
}

func (d *driver) read(a lines.Asked) (any, error) {
	c := d.config()
	if a.Committed() {
		c.Consumer.IsolationLevel = sarama.ReadCommitted
	}
	consumer, err := sarama.NewConsumer(d.bootstrap, c)
	if err != nil {
		return nil, err
	}
	defer func() { _ = consumer.Close() }()
	came := make(chan *sarama.ConsumerMessage)
	over := make(chan struct{})
	var running sync.WaitGroup
	for p := int32(0); p < a.Partitions; p++ {
		one, err := consumer.ConsumePartition(a.Topic, p, sarama.OffsetOldest)
		if err != nil {
			return nil, err
		}
		running.Add(1)
		go func() {
			defer running.Done()
			defer func() { _ = one.Close() }()
			for {
				select {
				case m := <-one.Messages():
					select {
					case came <- m:
					case <-over:
						return
					}
				case <-over:
					return
				}
			}
		}()
	}
	found := [][]any{}
	late := time.After(40 * time.Second)
	for len(found) < a.Count {
		select {
		case m := <-came:
			found = append(found, lines.Row(m.Partition, m.Offset, m.Key, m.Value))
		case <-late:
			close(over)
			return nil, fmt.Errorf("%d of %d records came", len(found), a.Count)
		}
	}
	close(over)
	running.Wait()
	return found, nil
}

type member struct {
	lines.Seen
	group sarama.ConsumerGroup
	topic string
	stop  context.CancelFunc
	ended chan struct{}
}

func (m *member) Setup(s sarama.ConsumerGroupSession) error {
	m.Assigned(s.Claims()[m.topic])
	return nil
}

func (m *member) Cleanup(s sarama.ConsumerGroupSession) error {
	m.Revoked(s.Claims()[m.topic])
	return nil
}

func (m *member) ConsumeClaim(s sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case r, open := <-claim.Messages():
			if !open {
				return nil
			}
			m.Got(lines.Row(r.Partition, r.Offset, r.Key, r.Value))
			s.MarkMessage(r, "")
			s.Commit()
		case <-s.Context().Done():
			return nil
		}
	}
}

func (m *member) leave() (any, error) {
	m.stop()
	<-m.ended
	return m.State(), m.group.Close()
}

func (d *driver) join(a lines.Asked) (any, error) {
	c := d.config()
	c.Consumer.Group.InstanceId = a.Instance
	c.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{sarama.NewBalanceStrategyRange()}
	group, err := sarama.NewConsumerGroup(d.bootstrap, a.Group, c)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	m := &member{group: group, topic: a.Topic, stop: stop, ended: make(chan struct{})}
	go func() {
		defer close(m.ended)
		for ctx.Err() == nil {
			if err := group.Consume(ctx, []string{a.Topic}, m); err != nil && ctx.Err() == nil {
				m.Failed(err)
			}
		}
	}()
	d.members[a.Member] = m
	return true, nil
}

func (d *driver) begin(a lines.Asked) (any, error) {
	producer := d.producers[a.Producer]
	if producer == nil {
		c := d.config()
		idempotent(c)
		c.Producer.Transaction.ID = a.ID
		c.Producer.Transaction.Timeout = time.Duration(a.TimeoutMs) * time.Millisecond
		opened, err := sarama.NewSyncProducer(d.bootstrap, c)
		if err != nil {
			return nil, err
		}
		producer = opened
		d.producers[a.Producer] = producer
	}
	return true, producer.BeginTxn()
}

// transfer reads from one topic in a group and writes to another, each record and its offset in one transaction.
func (d *driver) transfer(a lines.Asked) (any, error) {
	c := d.config()
	idempotent(c)
	c.Producer.Transaction.ID = a.ID
	producer, err := sarama.NewSyncProducer(d.bootstrap, c)
	if err != nil {
		return nil, err
	}
	defer func() { _ = producer.Close() }()
	c = d.config()
	c.Consumer.IsolationLevel = sarama.ReadCommitted
	c.Consumer.Offsets.AutoCommit.Enable = false
	group, err := sarama.NewConsumerGroup(d.bootstrap, a.Group, c)
	if err != nil {
		return nil, err
	}
	defer func() { _ = group.Close() }()
	ctx, stop := context.WithTimeout(context.Background(), 40*time.Second)
	defer stop()
	h := &transferring{asked: a, producer: producer, stop: stop}
	for ctx.Err() == nil && h.err == nil {
		if err := group.Consume(ctx, []string{a.Topic}, h); err != nil && ctx.Err() == nil {
			return nil, err
		}
	}
	return a.Count - h.done, h.err
}

type transferring struct {
	mu       sync.Mutex
	asked    lines.Asked
	producer sarama.SyncProducer
	stop     context.CancelFunc
	done     int
	err      error
}

func (t *transferring) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (t *transferring) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (t *transferring) ConsumeClaim(s sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case r, open := <-claim.Messages():
			if !open {
				return nil
			}
			if err := t.move(r); err != nil {
				t.stop()
				return err
			}
		case <-s.Context().Done():
			return nil
		}
	}
}

func (t *transferring) move(r *sarama.ConsumerMessage) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.err = t.producer.BeginTxn()
	if t.err == nil {
		_, _, t.err = t.producer.SendMessage(&sarama.ProducerMessage{Topic: t.asked.To, Partition: r.Partition,
			Key: sarama.ByteEncoder(r.Key), Value: sarama.ByteEncoder(r.Value)})
	}
	if t.err == nil {
		t.err = t.producer.AddMessageToTxn(r, t.asked.Group, nil)
	}
	if t.err == nil {
		t.err = t.producer.CommitTxn()
	}
	if t.err != nil {
		return t.err
	}
	t.done++
	if t.done >= t.asked.Count {
		t.stop()
	}
	return nil
}

func (d *driver) administer(a lines.Asked) (any, error) {
	switch a.Do {
	case "create":
		return true, d.admin.CreateTopic(a.Topic,
			&sarama.TopicDetail{NumPartitions: a.Partitions, ReplicationFactor: -1, ConfigEntries: a.Configs}, false)
	case "delete":
		return true, d.admin.DeleteTopic(a.Topic)
	case "topics":
		found, err := d.admin.ListTopics()
		names := []string{}
		for name := range found {
			names = append(names, name)
		}
		return names, err
	case "describe":
		found, err := d.admin.DescribeTopics([]string{a.Topic})
		if err != nil {
			return nil, err
		}
		if found[0].Err != sarama.ErrNoError {
			return nil, found[0].Err
		}
		return len(found[0].Partitions), nil
	case "grow":
		return true, d.admin.CreatePartitions(a.Topic, a.Partitions, nil, false)
	case "truncate":
		if err := d.admin.DeleteRecords(a.Topic, map[int32]int64{a.Partition: a.Offset}); err != nil {
			return nil, err
		}
		return d.client.GetOffset(a.Topic, a.Partition, sarama.OffsetOldest)
	case "offset":
		if err := d.client.RefreshMetadata(a.Topic); err != nil {
			return nil, err
		}
		return d.client.GetOffset(a.Topic, a.Partition, a.At)
	case "configs":
		entries, err := d.admin.DescribeConfig(sarama.ConfigResource{Type: sarama.TopicResource, Name: a.Topic})
		found := map[string]string{}
		for _, e := range entries {
			found[e.Name] = e.Value
		}
		return found, err
	case "alter":
		changes := map[string]sarama.IncrementalAlterConfigsEntry{}
		for name, value := range a.Configs {
			op := sarama.IncrementalAlterConfigsOperationSet
			if value == nil {
				op = sarama.IncrementalAlterConfigsOperationDelete
			}
			changes[name] = sarama.IncrementalAlterConfigsEntry{Operation: op, Value: value}
		}
		return true, d.admin.IncrementalAlterConfig(sarama.TopicResource, a.Topic, changes, false)
	case "groups":
		found, err := d.admin.ListConsumerGroups()
		names := []string{}
		for name := range found {
			names = append(names, name)
		}
		return names, err
	case "group":
		found, err := d.admin.DescribeConsumerGroups([]string{a.Group})
		if err != nil {
			return nil, err
		}
		return map[string]any{"state": found[0].State, "members": len(found[0].Members)}, nil
	case "delete_group":
		return true, d.admin.DeleteConsumerGroup(a.Group)
	case "committed":
		offsets, err := d.admin.ListConsumerGroupOffsets(a.Group, nil)
		if err != nil {
			return nil, err
		}
		found := map[int32]int64{}
		for p, block := range offsets.Blocks[a.Topic] {
			found[p] = block.Offset
		}
		return found, nil
	case "acl_add":
		return true, d.admin.CreateACL(
			sarama.Resource{
				ResourceType: sarama.AclResourceTopic, ResourceName: a.Topic, ResourcePatternType: sarama.AclPatternLiteral,
			},
			sarama.Acl{
				Principal: a.Principal, Host: "*", Operation: sarama.AclOperationRead, PermissionType: sarama.AclPermissionAllow,
			})
	case "acls":
		found, err := d.admin.ListAcls(sarama.AclFilter{
			ResourceType: sarama.AclResourceAny, ResourcePatternTypeFilter: sarama.AclPatternAny,
			Operation: sarama.AclOperationAny, PermissionType: sarama.AclPermissionAny, Version: 1,
		})
		count := 0
		for _, one := range found {
			count += len(one.Acls)
		}
		return count, err
	case "acl_delete":
		gone, err := d.admin.DeleteACL(sarama.AclFilter{
			ResourceType: sarama.AclResourceTopic, ResourceName: &a.Topic, Principal: &a.Principal,
			ResourcePatternTypeFilter: sarama.AclPatternLiteral, Operation: sarama.AclOperationRead,
			PermissionType: sarama.AclPermissionAllow, Version: 1,
		}, false)
		return len(gone), err
	}
	return nil, fmt.Errorf("no such verb: %s", a.Do)
}
